"""Whatever a script tracks, in whatever mode, survives a step that fails and a resume."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn
from trainings import SAMPLES

from argosy.data import Loader
from argosy.train import Run, Step


class Average:
    """Somebody's own average of weights, which is no module."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: each.detach().clone() for name, each in model.named_parameters()}
        self.count = 0

    def update_parameters(self, model: nn.Module) -> None:
        self.count += 1
        for name, each in model.named_parameters():
            self.shadow[name].lerp_(each.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow, self.count = state["shadow"], state["count"]


class Nothing:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {}


class Metric(nn.Module):
    """A buffer that is counted, one that is not there yet, and state of its own."""

    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("later", None)
        self.seen = {"n": 0}

    def step(self) -> None:
        self.total += 1
        self.seen["n"] += 1

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


Make = Callable[[nn.Module, torch.optim.Optimizer], Any]
THINGS: dict[str, Make] = {
    "scaler": lambda m, o: torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2),
    "scaler that is off": lambda m, o: torch.amp.GradScaler("cpu", enabled=False),
    "scaler without its device": lambda m, o: torch.amp.GradScaler("cuda", enabled=torch.cuda.is_available()),
    "lambda": lambda m, o: schedules.LambdaLR(o, lambda epoch: 0.9**epoch),
    "one cycle": lambda m, o: schedules.OneCycleLR(o, 0.1, total_steps=50),
    "cyclic": lambda m, o: schedules.CyclicLR(o, 0.01, 0.1),
    "plateau": lambda m, o: schedules.ReduceLROnPlateau(o, patience=1),
    "sequential": lambda m, o: schedules.SequentialLR(o, [schedules.ConstantLR(o), schedules.LinearLR(o)], [3]),
    "chained": lambda m, o: schedules.ChainedScheduler([schedules.ConstantLR(o), schedules.LinearLR(o)]),
    "swa": lambda m, o: SWALR(o, 0.01),
    "averaged model": lambda m, o: AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True),
    "average": lambda m, o: Average(m),
    "nothing": lambda m, o: Nothing(),
    "metric": lambda m, o: Metric(),
}


def sail(directory: Path, make: Make, *, breaks_at: int = -1) -> dict[str, bytes]:
    """Train for 5 steps; what is tracked at the end."""
    run = Run(directory, seed=1, save_every=100)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    thing, data = make(model, optimizer), Loader(SAMPLES, batch=4)
    run.track(model=model, optimizer=optimizer, thing=thing)
    for step in run.steps(until=5):
        with step:
            train(step, model, optimizer, thing, data, is_broken=step.number == breaks_at)
    found = run.tracked.state()
    tensors = {name: tensor.numpy().tobytes() for name, tensor in found.tensors().items()}
    return {**tensors, "values": repr(sorted(found.values.get("thing", {}).items())).encode()}


def train(
    step: Step, model: nn.Module, optimizer: torch.optim.Optimizer, thing: Any, data: Loader, *, is_broken: bool
) -> None:
    loss = model(step.batch(data)).square().mean()
    scaler = thing if isinstance(thing, torch.amp.GradScaler) else torch.amp.GradScaler("cpu", enabled=False)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    if is_broken:
        raise ZeroDivisionError
    scaler.step(optimizer)
    scaler.update()
    if isinstance(thing, schedules.ReduceLROnPlateau):
        thing.step(float(loss.detach()))
    elif isinstance(thing, AveragedModel | Average):
        thing.update_parameters(model)
    elif isinstance(thing, schedules.LRScheduler | Metric):
        thing.step()


@pytest.mark.parametrize("name", THINGS)
def test_it_is_the_same_after_a_failed_step_and_a_resume(tmp_path: Path, name: str):
    calm = sail(tmp_path / "calm", THINGS[name])
    for at in (0, 3):  # Before its first step, and later.
        with pytest.raises(ZeroDivisionError):
            sail(tmp_path / f"hard{at}", THINGS[name], breaks_at=at)
        assert sail(tmp_path / f"hard{at}", THINGS[name]) == calm, at
