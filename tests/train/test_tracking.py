"""A copy of the tracked state brings back the same bits into the tensors that are there."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from argosy.core import ConfigError
from argosy.train.arena import Packing, unpack, write
from argosy.train.tracking import Tracked
from argosy.transfer import State, copy_of, take_over, tensors_state


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

    def state(self) -> State:
        """A copy of everything."""
        return copy_of(self.tracked.state())

    def take_over(self, copy: State) -> None:
        take_over(self.tracked.state(), copy)


def assert_same(one: State, other: State) -> None:
    assert one.values == other.values
    assert {name: unit.options for name, unit in one.units.items()} == {n: u.options for n, u in other.units.items()}
    ones, others = one.tensors(), other.tensors()
    assert ones.keys() == others.keys()
    for name, tensor in ones.items():
        assert tensor.dtype == others[name].dtype
        assert torch.equal(tensor, others[name]), name


KINDS = ["adamw", "momentum", "plain", "tensor rate", "adagrad"]


@pytest.mark.parametrize("kind", KINDS)
def test_t1_another_generation_goes_on_with_the_same_bits(kind: str):
    first, second = Training(kind), Training(kind)
    for number in range(5):
        first.step(number)
    second.step(77)  # A rehearsal leaves state behind, which must not matter.
    second.take_over(first.state())
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
    held = {name: tensor.data_ptr() for name, tensor in training.tracked.state().tensors().items() if "::" in name}
    parameters = list(training.model.parameters())
    training.step(1)
    training.take_over(before)
    assert_same(training.state(), before)
    assert all(a is b for a, b in zip(parameters, training.model.parameters(), strict=True))
    now = training.tracked.state().tensors()
    assert {name: now[name].data_ptr() for name in held} == held


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_goes_back_to_before_its_first_step(kind: str):
    training = Training(kind)
    before = training.state()
    training.step(0)
    training.take_over(before)
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
    before = copy_of(tracked.state())
    tracked.settle()
    take_over(tracked.state(), before)
    assert_same(tracked.state(), before)


def test_an_optimizer_without_parameters_and_a_module_without_buffers_are_kept():
    tracked, module = Tracked(), nn.Identity()
    tracked.add("module", module)
    tracked.add("optimizer", torch.optim.SGD([{"params": []}], lr=0.1))
    before = copy_of(tracked.state())
    take_over(tracked.state(), before)
    assert_same(tracked.state(), before)


class Counted(nn.Linear):
    """A module with extra state, as quantising layers have it."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.seen: Any = {"n": 0, "scale": torch.zeros(2)}

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


@pytest.mark.parametrize("light", [False, True])
def test_extra_state_of_modules_comes_back(light: bool):
    tracked, model = Tracked(), nn.Sequential(nn.Linear(2, 2), Counted())
    tracked.add("model", model)
    before = tracked.changing() if light else copy_of(tracked.state())
    model[1].seen["n"] += 1
    model[1].seen["scale"] += 1
    tracked.take_over_changing(before) if light else take_over(tracked.state(), before)
    assert model[1].seen["n"] == 0
    assert torch.equal(model[1].seen["scale"], torch.zeros(2))


def test_a_buffer_that_is_replaced_or_not_persistent_comes_back():
    tracked, model = Tracked(), nn.Module()
    model.register_buffer("kept", torch.zeros(2))
    model.register_buffer("cache", torch.zeros(2), persistent=False)
    tracked.add("model", model)
    light, full = tracked.changing(), copy_of(tracked.state())
    for back in (lambda: tracked.take_over_changing(light), lambda: take_over(tracked.state(), full)):
        model.kept = torch.ones(2)
        model.cache += 1
        back()
        assert model.kept.tolist() == [0, 0] == model.cache.tolist()
    assert "cache" not in tracked.state(transient=False).units


def test_a_rate_and_moments_that_are_tensors_stay_the_same_tensors():
    tracked, model = Tracked(), nn.Linear(2, 2)
    betas = (torch.tensor(0.5), torch.tensor(0.9))
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1), betas=betas)
    tracked.add("model", model)
    tracked.add("optimizer", optimizer)
    before = copy_of(tracked.state())
    betas[0].fill_(0.1)
    take_over(tracked.state(), before)
    group = optimizer.param_groups[0]
    assert group["betas"][0] is betas[0]
    assert group["betas"][0].item() == 0.5
    assert isinstance(group["lr"], torch.Tensor)


def test_an_option_that_the_script_added_later_comes_along():
    first, second = Training("adamw"), Training("adamw")
    first.optimizer.param_groups[0]["warm"] = (1, 0.5)
    second.take_over(first.state())
    assert second.optimizer.param_groups[0]["warm"] == [1, 0.5]  # JSON knows no tuples.


def test_a_state_survives_its_bytes():
    training = Training("adamw")
    training.step(0)
    state = training.state()
    odd = {"empty": torch.empty(0, 3), "scalar": torch.tensor(7), "half": torch.ones(3, dtype=torch.bfloat16)}
    state.units |= tensors_state(odd).units
    packed = Packing().plan(state)
    content = torch.empty(packed.size, dtype=torch.uint8)
    write(packed, content)
    assert_same(unpack(packed.description, content), state)


def test_the_light_copy_leaves_large_averages_out():
    tracked = Tracked()
    tracked.add("model", nn.BatchNorm1d(4))
    tracked.add("small", Named(torch.ones(4)))
    tracked.add("large", Named(torch.ones(1 << 20)))
    light = tracked.changing()
    assert set(light.others.values) == set(tracked.changing().others.values) == {"small"}
    assert set(light.buffers) == {"running_mean", "running_var", "num_batches_tracked"}
    assert set(light.others.units) == {"small.tensor"}


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


class Outer(nn.Module):
    """A model that is sharded inside."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.body(batch)


def test_after_a_forward_pass_that_broke_off_shards_are_in_place_again():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = Outer()
        fully_shard(model.body)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tracked = Tracked()
        tracked.add("model", model)
        tracked.add("optimizer", optimizer)
        before = copy_of(tracked.state())
        tracked.settle()  # Nothing was forwarded yet.
        hook = model.body[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(1, 2))
        hook.remove()
        tracked.settle()
        take_over(tracked.state(), before)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    finally:
        dist.destroy_process_group()
