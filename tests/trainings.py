"""A run with a small model, in one process without a launcher."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from argosy.data import Loader
from argosy.train import Run, Step

SAMPLES = np.random.default_rng(0).standard_normal((40, 4)).astype(np.float32)


class Training:
    """A run with a small model, as a script makes it."""

    def __init__(self, directory: Path, *, width: int = 3, **how: Any) -> None:
        self.run = Run(directory, seed=1, **{"save_every": 4, **how})
        self.model = nn.Sequential(nn.Linear(4, width), nn.Dropout(0.2), nn.Linear(width, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.data = Loader(SAMPLES, batch=4)
        self.run.track(model=self.model, optimizer=self.optimizer)

    def update(self, step: Step, factor: float = 1.0) -> torch.Tensor:
        loss = self.model(step.batch(self.data)).square().mean() * factor
        loss.backward()
        self.optimizer.step()
        self.run.log(loss=loss)
        return loss

    def sail(self, until: int, work: Callable[[Step], Any] | None = None) -> "Training":
        for step in self.run.steps(until=until):
            with step:
                (work or self.update)(step)
        return self

    def breaking(self, at: int, *, first: bool) -> Callable[[Step], None]:
        """Work that raises at a step, before or after its update."""

        def work(step: Step) -> None:
            self.run.state["seen"] = [*self.run.state.get("seen", []), step.number]
            if step.number == at and first:
                raise ZeroDivisionError
            self.update(step)
            if step.number == at:
                raise ZeroDivisionError

        return work

    def bits(self) -> dict[str, bytes]:
        return {name: tensor.numpy().tobytes() for name, tensor in self.run.tracked.state().tensors().items()}
