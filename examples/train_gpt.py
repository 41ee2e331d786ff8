"""Train a small transformer, character by character, with plain PyTorch DDP on Gloo.

    argosy run -n 4 --max-restarts 3 examples/train_gpt.py [steps] [checkpoint]
    torchrun --nproc-per-node 4 examples/train_gpt.py [steps] [checkpoint]

Nothing in it knows Argosy. Rank 0 saves a checkpoint every 20 steps, and a start finds the newest one: so a
run whose ranks die and start again ends with the same weights, bit for bit, as a run that nobody touched.
Takes half a minute on two cores. Expect the loss to fall from 3.2 to 0.3.
"""

import hashlib
import os
import random
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 300
CHECKPOINT = Path(sys.argv[2] if len(sys.argv) > 2 else "runs/train_gpt/checkpoints/gpt.pt")
SAVE_EVERY, PRINT_EVERY = 20, 5
CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 64, 64, 4, 2, 8


def harbour_log(lines: int) -> str:
    """Invent the log of a harbour: the same text on every machine."""
    pick = random.Random(1857).choice
    ships = ["the brig Halcyon", "the cutter Wren", "the schooner Juno", "the barque Orlop", "the sloop Tern"]
    cargo = ["salt", "cedar", "lamp oil", "wool", "copper", "barley", "indigo", "slate"]
    ports = ["Lisbon", "Genoa", "Bergen", "Cork", "Cadiz", "Riga", "Malaga"]
    winds = ["a fair wind", "a wind from the north", "no wind at all", "fog at dawn", "a falling glass"]
    verbs = ["came in from {0} with {1}", "sailed for {0} with {1}", "waits for {1} out of {0}"]
    log: list[str] = []
    for day in range(lines):
        deed = pick(verbs).format(pick(ports), pick(cargo))
        log.append(f"day {day % 365 + 1}: {pick(ships)} {deed}; {pick(winds)}.\n")
    return "".join(log)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm_1(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, letters: int) -> None:
        super().__init__()
        self.letter, self.place = nn.Embedding(letters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, letters)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.letter(x) + self.place(torch.arange(x.shape[1]))
        return self.head(self.norm(self.blocks(hidden)))


def batch(text: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """The batch of this rank at `step`: drawn anew from the step, so a restart sees the same one again."""
    draw = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=draw)
    windows = torch.stack([text[s : s + CONTEXT + 1] for s in starts.tolist()])
    return windows[:, :-1], windows[:, 1:]


def loss_at(step: int, model: nn.Module, text: Tensor) -> Tensor:
    inputs, targets = batch(text, step)
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def save(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    CHECKPOINT.parent.mkdir(parents=True, exist_ok=True)
    unfinished = CHECKPOINT.with_suffix(".tmp")
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, unfinished)
    os.replace(unfinished, CHECKPOINT)  # Whoever reads finds the old checkpoint or the new one, whole.


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    letters = sorted(set(harbour_log(1000)))
    text = torch.tensor([letters.index(letter) for letter in harbour_log(1000)])
    model = GPT(len(letters))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first, loud = 0, dist.get_rank() == 0
    if CHECKPOINT.exists():
        saved = torch.load(CHECKPOINT)
        first = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        if loud:
            print(f"resumed from step {first}", flush=True)
    replica = DistributedDataParallel(model)
    loss_at(first, replica, text).backward()  # Not a step: DDP orders its buckets by the first pass.
    began, loss = time.monotonic(), torch.zeros(())
    for step in range(first + 1, STEPS + 1):
        loss = loss_at(step, replica, text)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loud and step % PRINT_EVERY == 0:
            seconds = time.monotonic() - began
            print(f"step {step}/{STEPS}  loss {loss.item():.4f}  {seconds:.1f} s", flush=True)
        if loud and (step % SAVE_EVERY == 0 or step == STEPS):
            save(step, model, optimizer)
    if loud:
        weights = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
        print(f"done  loss {loss.item():.4f}  weights {hashlib.sha256(weights).hexdigest()[:16]}", flush=True)
    del replica  # Before its group: torch 2.13 can hang when DDP is freed after it.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
