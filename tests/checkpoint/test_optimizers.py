"""Optimizer-aware, by its seven tests: moments follow names, absent stays absent, units move whole."""

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from checkpoint.layouts import RANKS, SHAPES, Plain
from torch import nn

import argosy
from argosy.checkpoint import Saver, restore
from argosy.core import ConfigError
from argosy.transfer import Box, Split, blocked, describe, sharded

SCRIPT = Path(__file__).with_name("layouts.py")


@pytest.mark.system
@pytest.mark.timeout(600)
def test_1_a_step_after_a_move_is_bitwise_that_of_the_run_that_never_moved(tmp_path: Path):
    """Every layout trained and saved, then each restored into each and trained one step more."""
    env = os.environ | {
        "PYTHONPATH": str(Path(argosy.__file__).parents[1]),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    ended = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path)], env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    still = Plain("one")
    for step in range(4):
        still.train(step)
    wrong: list[str] = []
    for source, destination in product(RANKS, RANKS):
        found = torch.load(tmp_path / f"{source}-to-{destination}.pt")
        assert {name: tensor.shape for name, tensor in found.items()} == SHAPES
        if not all(torch.equal(found[name], tensor) for name, tensor in still.full().items()):
            wrong.append(f"{source} to {destination}")
    assert wrong == []


class Pair(nn.Module):
    def __init__(self, order: str) -> None:
        super().__init__()
        for name in order:
            setattr(self, name, nn.Parameter(torch.full((3, 3), float(ord(name)))))


def grow(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for step, (name, parameter) in product(range(steps), model.named_parameters()):
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, sum(map(ord, name)) + step)
    optimizer.step()


def moved_to(tmp_path: Path, source: object, destination: object, **options: object) -> None:
    with Saver(tmp_path, sample=1) as saver:
        saver.save(source, 1).wait(300)
    restore(tmp_path, into=destination, **options)


def test_2_moments_follow_names_not_places(tmp_path: Path):
    model, other = Pair("ab"), Pair("ba")
    optimizer = torch.optim.Adam([{"params": [model.a], "lr": 0.1}, {"params": [model.b], "lr": 0.2}])
    grow(model, optimizer)
    reordered = torch.optim.Adam([{"params": [other.b], "lr": 0.5}, {"params": [other.a], "lr": 0.6}])
    moved_to(tmp_path, {"m": model, "o": optimizer}, {"m": other, "o": reordered})
    for name in "ab":
        old, new = optimizer.state[getattr(model, name)], reordered.state[getattr(other, name)]
        assert torch.equal(old["exp_avg"], new["exp_avg"])
        assert torch.equal(getattr(model, name), getattr(other, name))
    assert [group["lr"] for group in reordered.param_groups] == [0.2, 0.1]


def test_3_frozen_unused_and_lazy_state_stays_absent(tmp_path: Path):
    model, other = Pair("abc"), Pair("abc")
    model.b.requires_grad_(False)
    optimizer = torch.optim.AdamW([model.a, model.c])
    model.a.grad = torch.ones(3, 3)
    optimizer.step()  # c is never used.
    second = torch.optim.AdamW([other.a, other.c])
    grow(other, second)
    moved_to(tmp_path, {"m": model, "o": optimizer}, {"m": other, "o": second})
    assert set(second.state) == {other.a}
    assert set(second.state[other.a]) == {"step", "exp_avg", "exp_avg_sq"}


def test_4_a_unit_is_old_or_new_never_mixed(tmp_path: Path):
    """The disk fails after the moments were written and before the parameter was: the old step stands whole."""
    model = Pair("ab")
    optimizer = torch.optim.AdamW(model.parameters())
    grow(model, optimizer)
    state = {"m": model, "o": optimizer}
    said: list[str] = []
    with Saver(tmp_path, sample=1, say=said.append) as saver:
        saver.save(state, 1).wait(300)
        old = {name: tensor.clone() for name, tensor in restore(tmp_path).tensors.items()}
        grow(model, optimizer)
        saver._committer.retry_after_s = ()

        def fail(operation: object) -> None:
            if type(operation).__name__ == "Truncate":
                raise OSError(5, "Input/output error")

        saver._committer.before = fail
        with pytest.raises(OSError, match="Input/output"):
            saver.save(state, 2).wait(300)
    found = restore(tmp_path)
    assert found.step == 1
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in old.items())
    assert "step 2 was not saved" in said[0]


def test_5_blocks_move_whole_or_not_at_all():
    aligned = sharded((4, 8), (2,), (Split(0),))
    assert [(piece.rank, piece.box) for piece in blocked(aligned, 16).pieces] == [
        (0, Box((0,), (1,))),
        (1, Box((1,), (1,))),
    ]
    with pytest.raises(ConfigError, match=r"blocks of 12 cells are cut by \[0:2,0:8\] of \[4, 8\] on rank 0"):
        blocked(aligned, 12)
    with pytest.raises(ConfigError, match="blocks of 4 cells are cut"):
        blocked(sharded((4, 8), (2,), (Split(1),)), 4)
    uneven = sharded((65, 128), (2,), (Split(0),))  # Rank 0 has no whole blocks: torchao keeps plain numbers there.
    with pytest.raises(ConfigError, match="blocks of 256 cells are cut"):
        blocked(uneven, 256)


def test_6_tied_weights_are_one_unit_and_stay_tied(tmp_path: Path):
    def tied() -> nn.Module:
        model = nn.Module()
        model.embed, model.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        model.head.weight = model.embed.weight
        return model

    model, other = tied(), tied()
    optimizer, second = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(other.parameters())
    grow(model, optimizer)
    state = describe(model, optimizer)
    assert list(state.units) == ["embed.weight"]
    assert state.units["embed.weight"].aliases == ("head.weight",)
    moved_to(tmp_path, state, {"m": other, "o": second})
    assert other.head.weight is other.embed.weight
    assert torch.equal(other.head.weight, model.head.weight)
    found = restore(tmp_path).tensors
    assert found["head.weight"] is found["embed.weight"]
    untied = nn.Module()
    untied.head = nn.Linear(3, 5, bias=False)
    restore(tmp_path, into=untied, roles={"parameter"}, fresh=True)
    assert torch.equal(untied.head.weight, model.head.weight)


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "plain SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "a tensor as learning rate": lambda p: torch.optim.AdamW(p, foreach=False, lr=torch.tensor(0.1)),
    "foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "Rprop": lambda p: torch.optim.Rprop(p),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_7_every_optimizer_goes_on_bitwise(tmp_path: Path, name: str):
    torch.manual_seed(1)
    model, other = nn.Linear(5, 7), nn.Linear(5, 7)
    optimizer, second = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](other.parameters())
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    moved_to(tmp_path, {"m": model, "o": optimizer}, {"m": other, "o": second})
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        a.grad = torch.randn_like(a)
        b.grad = a.grad.clone()
    optimizer.step()
    second.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_7_capturable(tmp_path: Path):
    """It steps on accelerators only, so its state is made by hand: the step is a tensor beside the parameter."""
    model, other = nn.Linear(5, 7), nn.Linear(5, 7)
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    for parameter in model.parameters():
        moments = {"exp_avg": torch.randn_like(parameter), "exp_avg_sq": torch.rand_like(parameter)}
        optimizer.state[parameter] = {"step": torch.tensor(3.0), **moments}
    second = torch.optim.AdamW(other.parameters(), capturable=True)
    moved_to(tmp_path, {"m": model, "o": optimizer}, {"m": other, "o": second})
    assert second.param_groups[0]["capturable"] is True
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        for key, value in optimizer.state[a].items():
            assert torch.equal(second.state[b][key], value)
            assert second.state[b][key].device == b.device


def test_7_two_optimizers(tmp_path: Path):
    model, other = Pair("ab"), Pair("ab")
    both = [torch.optim.AdamW([model.a]), torch.optim.SGD([model.b], lr=0.1, momentum=0.9)]
    others = [torch.optim.AdamW([other.a]), torch.optim.SGD([other.b], lr=0.1, momentum=0.9)]
    for optimizer in both:
        grow(model, optimizer)
    moved_to(tmp_path, describe(model, both), describe(other, others))
    assert torch.equal(others[1].state[other.b]["momentum_buffer"], both[1].state[model.b]["momentum_buffer"])
    assert torch.equal(others[0].state[other.a]["exp_avg"], both[0].state[model.a]["exp_avg"])


def test_7_two_optimizers_of_the_same_parameters(tmp_path: Path):
    def made() -> tuple[Pair, dict[str, torch.optim.Optimizer]]:
        model = Pair("ab")
        return model, {
            "first": torch.optim.AdamW(model.parameters(), lr=0.1),
            "second": torch.optim.Adam(model.parameters(), lr=0.2),
            "third": torch.optim.SGD(model.parameters(), lr=0.3),
        }

    (model, optimizers), (other, others) = made(), made()
    for optimizer in optimizers.values():
        grow(model, optimizer)
    optimizers["third"].param_groups[0]["lr"] = 0.4
    with Saver(tmp_path) as saver:
        saver.save(describe(model, optimizers), 1).wait()
    assert restore(tmp_path, into=describe(other, others)).unused == []
    assert others["third"].param_groups[0]["lr"] == 0.4
    for one, another in zip(optimizers.values(), others.values(), strict=True):
        grow(model, one, 2)
        grow(other, another, 2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


class Mine(torch.optim.AdamW):
    """Somebody's own, which keeps what AdamW does."""


@pytest.mark.parametrize(("saved", "here"), [("Adam", "RAdam"), ("NAdam", "Adam"), ("SGD", "Adam"), ("SGD", "Muon")])
def test_state_of_another_class_is_refused_though_its_names_are_equal(tmp_path: Path, saved: str, here: str):
    model, other = Pair("ab"), Pair("ba")
    optimizer, second = (getattr(torch.optim, name)(m.parameters()) for name, m in ((saved, model), (here, other)))
    grow(model, optimizer)
    before = other.a.detach().clone()
    state = {"m": other, "o": second}
    with pytest.raises(ConfigError, match=f"a was saved with {saved}, here its optimizer is {here}"):
        moved_to(tmp_path, {"m": model, "o": optimizer}, state, partial=True, fresh=True)
    assert torch.equal(other.a, before)
    rate = second.param_groups[0]["lr"]
    restore(tmp_path, into=state, roles={"parameter"}, fresh=True)
    assert torch.equal(other.a, model.a)
    assert (second.state, second.param_groups[0]["lr"]) == ({}, rate)


@pytest.mark.parametrize(("saved", "here"), [*product((torch.optim.Adam, torch.optim.AdamW, Mine), repeat=2)])
def test_classes_of_one_family_take_each_others_state(tmp_path: Path, saved: type, here: type):
    model, other = Pair("ab"), Pair("ba")
    optimizer, second = saved(model.parameters(), lr=0.3), here(other.parameters(), weight_decay=0.5)
    grow(model, optimizer)
    moved_to(tmp_path, {"m": model, "o": optimizer}, {"m": other, "o": second})
    assert torch.equal(second.state[other.a]["exp_avg"], optimizer.state[model.a]["exp_avg"])
    assert second.param_groups[0]["lr"] == 0.3
    is_decoupled = here is not torch.optim.Adam or saved is not torch.optim.Adam
    assert second.param_groups[0]["decoupled_weight_decay"] == is_decoupled


def test_checkpoints_that_do_not_name_the_class_are_judged_by_the_names_of_their_state(tmp_path: Path):
    model, other = Pair("ab"), Pair("ba")
    optimizer = torch.optim.Adam(model.parameters())
    grow(model, optimizer)
    old = describe(model, optimizer)
    for unit in old.units.values():
        del unit.options["class"]
    second = torch.optim.RAdam(other.parameters())
    moved_to(tmp_path, old, {"m": other, "o": second})
    assert torch.equal(second.state[other.a]["exp_avg"], optimizer.state[model.a]["exp_avg"])
    with pytest.raises(ConfigError, match="a::exp_avg was stored, which Adagrad does not know"):
        restore(tmp_path, into={"m": other, "o": torch.optim.Adagrad(other.parameters())})


def lbfgs_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(torch.ones(2, 5)) - torch.arange(7.0)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)


def test_7_one_state_for_all_parameters_goes_on_bitwise_and_in_its_order(tmp_path: Path):
    """LBFGS keeps a history of gradients of all parameters, one behind the other."""
    torch.manual_seed(1)
    model, other = nn.Linear(5, 7), nn.Linear(5, 7)
    first, second = (torch.optim.LBFGS(each.parameters(), lr=0.1, max_iter=3) for each in (model, other))
    for _ in range(3):
        lbfgs_step(model, first)
    moved_to(tmp_path, {"m": model, "o": first}, {"m": other, "o": second})
    for _ in range(2):
        lbfgs_step(model, first)
        lbfgs_step(other, second)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    before = other.weight.detach().clone()
    turned = torch.optim.LBFGS([*other.parameters()][::-1])
    with pytest.raises(
        ConfigError, match=r"o was saved of \['weight', 'bias'\], here it is a LBFGS of \['bias', 'weight'\]"
    ):
        restore(tmp_path, into={"m": other, "o": turned})
    assert torch.equal(other.weight, before)
    with pytest.raises(ConfigError, match="no place for stored o"):
        restore(tmp_path, into={"m": other, "o": torch.optim.AdamW(other.parameters())})


def test_schedules_scalers_and_generators_come_along(tmp_path: Path):
    def make() -> dict[str, object]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        average = torch.optim.swa_utils.AveragedModel(model)
        generator = torch.Generator().manual_seed(3)
        return {"m": model, "o": optimizer, "schedule": schedule, "ema": average, "rng": generator}

    state, other = make(), make()
    grow(state["m"], state["o"])
    state["schedule"].step()
    state["ema"].update_parameters(state["m"])
    torch.randn(7, generator=state["rng"])
    with Saver(tmp_path, sample=1) as saver:
        saver.save(state, 1).wait(300)
    wanted = torch.randn(3, generator=state["rng"])
    restore(tmp_path, into=other)
    assert torch.equal(torch.randn(3, generator=other["rng"]), wanted)
    assert other["schedule"].state_dict() == state["schedule"].state_dict()
    assert all(torch.equal(a, b) for a, b in zip(other["ema"].parameters(), state["ema"].parameters(), strict=True))


def test_infinities_come_along(tmp_path: Path):
    """JSON has none; a plateau schedule begins with one."""

    def make() -> dict[str, object]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD([{"params": [*model.parameters()], "bound": float("-inf")}])
        return {"m": model, "o": optimizer, "schedule": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)}

    state, other = make(), make()
    other["schedule"].best = 0.0
    other["o"].param_groups[0]["bound"] = 1.0
    with Saver(tmp_path, sample=1) as saver:
        saver.save(state, 1).wait(300)
    restore(tmp_path, into=other)
    assert other["schedule"].best == float("inf")
    assert other["o"].param_groups[0]["bound"] == float("-inf")
    other["schedule"].step(3.0)
    assert other["schedule"].best == 3.0


def test_a_parameter_of_no_module_is_an_error():
    with pytest.raises(ConfigError, match=r"group 0 .* holds a parameter that is not in the state, of shape \[2\]"):
        describe(nn.Linear(1, 1), torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1))
