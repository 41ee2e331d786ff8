"""What the trainings of bench/train.py have in common: the model, one update, and the record of steps that count."""

import os
import struct
import time
from pathlib import Path

import torch
from gpt import GPT, Config, loss_of
from torch import Tensor, nn

CONFIG = Config()
ROWS = 4
"""Of each rank, in each step."""
RECORD = struct.Struct("<dqd")
"""When a step counted, its number, and how long it took without what was saved after it."""


def model_and_seed() -> GPT:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return GPT(CONFIG)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def loss_of_rows(model: nn.Module) -> Tensor:
    """Of rows drawn at random: no input to wait for."""
    tokens = torch.randint(CONFIG.vocab_size, (ROWS, CONFIG.max_position_embeddings + 1))
    return loss_of(model(tokens[:, :-1]), tokens[:, 1:])


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    """Forward, backward and update."""
    loss = loss_of_rows(model)
    loss.backward()
    optimizer.step()
    return loss


class Steps:
    """A process's record of the steps that count: HOME/<rank>.<pid>.steps."""

    def __init__(self, home: str, rank: int) -> None:
        self._fd = os.open(Path(home, f"{rank}.{os.getpid()}.steps"), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        self._since = time.perf_counter()

    def begin(self) -> None:
        """What was done since the last step is no part of the next one."""
        self._since = time.perf_counter()

    def counts(self, step: int) -> None:
        """So many steps count now."""
        now = time.perf_counter()
        os.write(self._fd, RECORD.pack(time.time(), step, now - self._since))
        self._since = now
