"""A save is refused inside an optimizer's step and inside another save, where signal handlers may call it."""

import os
import signal
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from argosy.checkpoint import Saver, restore
from argosy.core import ConfigError


@contextmanager
def on_signal(number: int, handler: Callable[..., None]) -> Generator[None, None, None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def network(layers: int = 3) -> nn.Module:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))


def backward(model: nn.Module) -> torch.Tensor:
    model.zero_grad()
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    return loss


class Lazy(torch.optim.SGD):
    """A step of a user's own, which is interrupted in the middle."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = self.param_groups[0]["params"]
        parameters[0].sub_(1)
        os.kill(os.getpid(), signal.SIGUSR1)
        parameters[1].sub_(1)


def interrupted(work: Callable[[], object], at: int) -> int:
    """Do the work, and send SIGUSR1 when it calls its function number `at`; returns how many it called."""
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call"
        if event == "call" and calls - 1 == at:
            sys.setprofile(None)
            os.kill(os.getpid(), signal.SIGUSR1)

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def test_a_signal_handler_in_the_middle_of_a_step_is_told_to_wait(tmp_path: Path):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    saved, refused = list[int](), list[ConfigError]()

    def handler(*_: object) -> None:
        try:
            saved.append(saver.save({"model": model, "optimizer": optimizer}, len(saved)).step)
        except ConfigError as error:
            refused.append(error)

    def train() -> None:
        backward(model)
        optimizer.step()

    train()
    with Saver(tmp_path) as saver, on_signal(signal.SIGUSR1, handler):
        calls = interrupted(train, -1)
        for at in range(0, calls, calls // 25 or 1):
            count = len(saved)
            interrupted(train, at)
            saver.flush()
            if len(saved) > count:
                tensors = restore(tmp_path).tensors
                steps = {float(each) for name, each in tensors.items() if name.endswith("::step")}
                assert len(steps) == 1, "all parameters have made the same steps"
    assert len(saved) > 3
    assert len(refused) > 3
    assert {str(error) for error in refused} == {"save was called inside an optimizer's step, when it may be half done"}
    assert "set a flag" in str(refused[0].hint)


def test_a_step_of_ones_own_is_no_place_to_save_either(tmp_path: Path):
    model = network()
    optimizer = Lazy(model.parameters(), lr=0.1)
    found: list[str] = []

    def handler(*_: object) -> None:
        with pytest.raises(ConfigError) as refused:
            saver.save(model, 1)
        found.append(str(refused.value))

    with Saver(tmp_path) as saver, on_signal(signal.SIGUSR1, handler):
        optimizer.step()
    assert len(found) == 1


def test_a_signal_handler_in_the_middle_of_a_save_is_told_to_wait(tmp_path: Path):
    class Meter:
        def state_dict(self) -> dict[str, int]:
            os.kill(os.getpid(), signal.SIGUSR1)
            return {"n": 1}

        def load_state_dict(self, state: dict[str, int]) -> None: ...

    found: list[str] = []

    def handler(*_: object) -> None:
        with pytest.raises(ConfigError) as refused:
            saver.save(model, 2)
        saver.flush(10)
        found.append(str(refused.value))

    model = network()
    with Saver(tmp_path) as saver, on_signal(signal.SIGUSR1, handler):
        saver.save({"model": model, "meter": Meter()}, 1)
        saver.save(model, 3)
    assert found == ["save was called while this thread is in save"]
    assert restore(tmp_path).step == 3


@pytest.mark.parametrize("where", ["before", "after", "closure"])
def test_hooks_and_closures_are_told_to_wait(tmp_path: Path, where: str):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    refused: list[str] = []

    def save(*_: object) -> None:
        with pytest.raises(ConfigError) as error:
            saver.save(model, 1)
        refused.append(str(error.value))

    def closure() -> torch.Tensor:
        loss = backward(model)
        if where == "closure":
            save()
        return loss

    with Saver(tmp_path) as saver:
        if where == "before":
            optimizer.register_step_pre_hook(save)
        elif where == "after":
            optimizer.register_step_post_hook(save)
        optimizer.step(closure)
        saver.save(model, 1)
    assert refused == ["save was called inside an optimizer's step, when it may be half done"]


class Wrapped(torch.optim.Optimizer):
    """As accelerate's: it passes everything on, and was never initialised as an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)


def test_a_wrapper_without_hooks_is_fenced_at_the_optimizer_inside(tmp_path: Path):
    model = network(30)
    optimizer = Wrapped(torch.optim.AdamW(model.parameters()))
    with Saver(tmp_path) as saver:
        for step in range(3):
            backward(model)
            optimizer.step()
            wanted = {name: each.detach().clone() for name, each in model.named_parameters()}
            saver.save({"model": model, "optimizer": optimizer}, step)
    tensors = restore(tmp_path).tensors
    assert all(torch.equal(tensors[name], each) for name, each in wanted.items())
