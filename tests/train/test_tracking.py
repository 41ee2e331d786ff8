"""A capsule brings back the same bits into the tensors that are there."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from argosy.core import ConfigError
from argosy.train.arena import plan, unpack, write
from argosy.train.tracking import Capsule, Tracked


class Training:
    """A model with an optimizer and whatever else changes with it."""

    def __init__(self, optimizer: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        for parameter in self.model[3].parameters():
            parameter.requires_grad_(False)
        made: dict[str, Any] = {
            "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
            "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
            "plain": lambda p: torch.optim.SGD(p, lr=0.05),
            "tensor rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
            "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
        }
        self.optimizer = made[optimizer](self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, total_iters=9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=32.0, growth_interval=2)
        self.tracked = Tracked()
        for name in ("model", "optimizer", "schedule", "scaler"):
            self.tracked.add(name, getattr(self, name))

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(6, 4, generator=generator)).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()

    def state(self) -> Capsule:
        """A copy of everything."""
        found = self.tracked.capture()
        return Capsule({name: t.clone() for name, t in found.tensors.items()}, copy.deepcopy(found.values))


def assert_same(one: Capsule, other: Capsule) -> None:
    assert one.values == other.values
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert tensor.dtype == other.tensors[name].dtype
        assert torch.equal(tensor, other.tensors[name]), name


KINDS = ["adamw", "momentum", "plain", "tensor rate", "adagrad"]


@pytest.mark.parametrize("kind", KINDS)
def test_t1_another_generation_goes_on_with_the_same_bits(kind: str):
    first, second = Training(kind), Training(kind)
    for number in range(5):
        first.step(number)
    second.step(77)  # A rehearsal leaves state behind, which must not matter.
    second.tracked.adopt(first.state())
    assert_same(first.state(), second.state())
    for number in range(5, 9):
        first.step(number)
        second.step(number)
    assert_same(first.state(), second.state())


@pytest.mark.parametrize("kind", KINDS)
def test_t2_whoever_holds_the_tensors_keeps_them(kind: str):
    training = Training(kind)
    training.step(0)
    before = training.state()
    held = {name: tensor.data_ptr() for name, tensor in training.tracked.capture().tensors.items() if "/s/" in name}
    parameters = list(training.model.parameters())
    training.step(1)
    training.tracked.adopt(before)
    assert_same(training.state(), before)
    assert all(a is b for a, b in zip(parameters, training.model.parameters(), strict=True))
    now = training.tracked.capture().tensors
    assert {name: now[name].data_ptr() for name in held} == held


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_goes_back_to_before_its_first_step(kind: str):
    training = Training(kind)
    before = training.state()
    training.step(0)
    training.tracked.adopt(before)
    assert_same(training.state(), before)
    other = Training(kind)
    for number in range(3):
        training.step(number)
        other.step(number)
    assert_same(training.state(), other.state())


def test_settling_leaves_a_scaler_alone_that_is_switched_off_or_was_never_used():
    tracked = Tracked()
    tracked.add("off", torch.amp.GradScaler("cpu", enabled=False))
    tracked.add("unused", torch.amp.GradScaler("cpu"))
    before = tracked.capture()
    tracked.settle()
    tracked.adopt(before)
    assert_same(tracked.capture(), before)


def test_an_optimizer_without_parameters_and_a_module_without_buffers_are_kept():
    tracked, module = Tracked(), nn.Identity()
    tracked.add("module", module)
    tracked.add("optimizer", torch.optim.SGD([{"params": []}], lr=0.1))
    before = tracked.capture()
    tracked.optimizers["optimizer"].param_groups[0]["lr"] = 0.5
    tracked.adopt(before)
    assert tracked.optimizers["optimizer"].param_groups[0]["lr"] == 0.1


class Counted(nn.Linear):
    """A module with extra state, as quantising layers have it."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.seen: Any = {"n": 0, "scale": torch.zeros(2)}

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


@pytest.mark.parametrize("take", [Tracked.capture, Tracked.capture_light])
def test_extra_state_of_modules_comes_back(take: Any):
    tracked, model = Tracked(), nn.Sequential(nn.Linear(2, 2), Counted())
    tracked.add("model", model)
    found: Capsule = take(tracked)
    before = Capsule({name: tensor.clone() for name, tensor in found.tensors.items()}, found.values)
    model[1].seen["n"] += 1
    model[1].seen["scale"] += 1
    tracked.adopt(before)
    assert model[1].seen["n"] == 0
    assert torch.equal(model[1].seen["scale"], torch.zeros(2))


def test_a_capsule_survives_its_bytes():
    training = Training("adamw")
    training.step(0)
    capsule = training.state()
    odd = {"empty": torch.empty(0, 3), "scalar": torch.tensor(7), "half": torch.ones(3, dtype=torch.bfloat16)}
    capsule = Capsule({**capsule.tensors, **odd}, capsule.values)
    packed = plan(capsule)
    content = torch.empty(packed.size, dtype=torch.uint8)
    write(packed, capsule, content)
    assert_same(unpack(packed.description, content), capsule)


def test_the_light_capsule_leaves_large_averages_out():
    tracked = Tracked()
    tracked.add("model", nn.BatchNorm1d(4))
    tracked.add("small", Named(torch.ones(4)))
    tracked.add("large", Named(torch.ones(1 << 20)))
    light = tracked.capture_light()
    assert set(light.values) == {"small"}
    assert "model/b/running_mean" in light.tensors
    assert "model/p/weight" not in light.tensors


class Named:
    """Something with a state."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.tensor = state["tensor"]


def test_a_second_name_for_the_same_thing_is_refused():
    tracked, model = Tracked(), nn.Linear(1, 1)
    tracked.add("model", model)
    with pytest.raises(ConfigError, match="other is tracked already, as model"):
        tracked.add("other", model)
    with pytest.raises(ConfigError, match="model is tracked already"):
        tracked.add("model", nn.Linear(1, 1))


def test_what_has_no_state_is_refused():
    with pytest.raises(ConfigError, match="a int has no state_dict"):
        Tracked().add("counter", 3)
