"""What would be lost in silence is refused by name, before anything is written."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from argosy.checkpoint import Saver, list_steps, restore
from argosy.core import ConfigError


def saved(path: Path, state: object, step: int = 1) -> None:
    with Saver(path, sample=1) as saver:
        saver.save(state, step).wait(300)


def jagged() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)


def circle() -> dict[str, object]:
    inner: dict[str, object] = {"x": 1}
    inner["own"] = [2, inner]
    return inner


def freed() -> torch.Tensor:
    tensor = torch.ones(100)
    tensor.untyped_storage().resize_(64)
    return tensor


class Saying(nn.Module):
    """Says more in its state_dict than others can find."""

    def _save_to_state_dict(self, destination: dict[str, object], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}scb"] = torch.ones(2)


def hooked() -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_state_dict_post_hook(lambda module, said, prefix, _: said.update({f"{prefix}more": torch.ones(1)}))
    return module


def with_option(value: object) -> dict[str, object]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.param_groups[0]["extra"] = value
    return {"m": model, "o": optimizer}


def with_state(key: object, value: object) -> dict[str, object]:
    state = with_option(0)
    state["o"].state[state["m"].weight] = {key: value}
    return state


def nested(depth: int) -> list[object]:
    return [] if depth == 1 else [nested(depth - 1)]


def with_part(name: str) -> nn.Module:
    module = nn.Module()
    setattr(module, name, nn.Linear(2, 2))
    return module


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (lambda: {"model": nn.Linear(2, 2), "weight": torch.zeros(2, 2)}, "called weight: a parameter of the Linear"),
        (lambda: {"model": with_part("ema"), "ema": {"weight": torch.zeros(2, 2)}}, r"ema\.weight.*\['ema'\]"),
        (lambda: {"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}}, r"\['a\.b'\] and that at \['a'\]\['b'\]"),
        (lambda: {"a": {1: torch.ones(2), "1": torch.zeros(2)}}, r"\['a'\]\[1\] and that at \['a'\]\['1'\]"),
        (lambda: {1: torch.ones(2), "1": torch.zeros(2)}, "names, texts of at least one letter: 1"),
        (lambda: {"": torch.ones(2)}, "texts of at least one letter: ''"),
        (lambda: {"rank1/x": torch.ones(2)}, "'rank1/x' is what a rank's own 'x' is called"),
        (lambda: {"m": torch.empty(3, device="meta")}, "m cannot be kept: its tensor is on the meta device"),
        (lambda: {"m": torch.eye(3).to_sparse()}, "m cannot be kept: its tensor is sparse_coo"),
        (lambda: {"m": jagged()}, "m cannot be kept: its tensor is nested"),
        (lambda: {"m": nn.LazyLinear(3)}, "weight cannot be kept: its tensor is not initialised yet"),
        (lambda: {"a": circle()}, r"a\.own\.1 cannot be kept: it contains itself, at \['a'\]\['own'\]\[1\]"),
        (lambda: {"a": nested(65)}, "cannot be kept: it is nested more than 64 deep"),
        (lambda: {"m": freed()}, "m cannot be kept: its memory was freed, 64 of its 400 bytes are left"),
        (lambda: {"m": torch._to_functional_tensor(torch.ones(4))}, "m cannot be kept: its memory was freed"),
        (lambda: {"m": nn.Sequential(Saying())}, "0 has 'scb' in its state_dict, which is neither"),
        (lambda: {"m": hooked()}, "Linear has 'more' in its state_dict"),
        (lambda: with_option(torch.ones(2)), "group 0 of o has 'extra', a Tensor that cannot be kept"),
        (lambda: with_option({1, 2}), "group 0 of o has 'extra', a set that cannot be kept"),
        (lambda: with_state(1, torch.ones(2)), "optimizer state of weight cannot be kept: one of its keys is 1"),
        (lambda: with_state("a", jagged()), "weight::a cannot be kept: its tensor is nested"),
        (lambda: {"m": torch.ones(2), "a": np.array(["x"])}, "a cannot be kept: arrays of this dtype cannot: <U1"),
        (lambda: {"odd": "\ud800"}, "odd cannot be kept: it is a text that is no Unicode"),
        (lambda: {"t": torch.ones(1), "a": np.arange(3, dtype=">f4")}, "a cannot be kept: given numpy array has byte"),
        (lambda: {"t": torch.ones(1), "a": np.zeros(2, np.longdouble)}, "a cannot be kept: arrays of this dtype"),
        (lambda: {"t": torch.ones(1), "a": np.arange(3)[::-1]}, "a cannot be kept: .*negative"),
        (lambda: {"a": np.zeros(2, np.longdouble)}, "a cannot be kept: arrays of this dtype"),
    ],
)
def test_what_would_be_lost_is_refused_by_name(tmp_path: Path, state: Callable[[], object], words: str):
    with Saver(tmp_path) as saver, pytest.raises(ConfigError, match=words):
        saver.save(state(), 1)
    assert list_steps(tmp_path) == []


def test_code_in_an_optimizers_group_is_no_state(tmp_path: Path):
    saved(tmp_path, with_option(torch.float32))
    saved(tmp_path, with_option(len), 2)


def test_numbers_of_any_size_come_back(tmp_path: Path):
    """As numpy's generators have them."""
    generator, numbers = np.random.default_rng(3), [1 << 63, -(1 << 63), 1 << 64, -(1 << 64), 1 << 20000]
    saved(tmp_path, {"t": torch.ones(1), "n": numbers, "g": generator.bit_generator.state})
    into = {"t": torch.ones(1), "n": [], "g": np.random.default_rng(4).bit_generator.state}
    restore(tmp_path, into=into)
    assert into["n"] == numbers
    assert into["g"] == generator.bit_generator.state


def test_an_option_of_tuples_comes_back_as_it_was(tmp_path: Path):
    saved(tmp_path, with_option(((1, 2), [3, (4,)])))
    into = with_option(((0, 0), [0, (0,)]))
    restore(tmp_path, into=into)
    assert into["o"].param_groups[0]["extra"] == ((1, 2), [3, (4,)])


@pytest.mark.parametrize(
    ("stored", "here"),
    [({"a": 1.5}, [9]), ("abc", [9]), ([1, 2], {}), (5, [3]), (torch.ones(2), {}), ({}, torch.ones(2))],
)
def test_what_is_of_another_kind_here_is_refused_before_anything_is_written(
    tmp_path: Path, stored: object, here: object
):
    saved(tmp_path, {"m": nn.Linear(2, 2), "log": stored})
    model = nn.Linear(2, 2)
    before = model.weight.clone()
    with pytest.raises(ConfigError, match="log"):
        restore(tmp_path, into={"m": model, "log": here})
    assert torch.equal(model.weight, before)


class Choosy:
    def state_dict(self) -> dict[str, int]:
        return {"x": 1}

    def load_state_dict(self, state: object) -> None:
        raise ValueError("not this one")


def test_who_refuses_what_was_stored_is_named(tmp_path: Path):
    saved(tmp_path, {"m": nn.Linear(2, 2), "schedule": Choosy()})
    with pytest.raises(ConfigError, match="schedule: its load_state_dict refused what was stored: ValueError"):
        restore(tmp_path, into={"m": nn.Linear(2, 2), "schedule": Choosy()})


def test_what_is_there_twice_and_what_is_deep_comes_back(tmp_path: Path):
    twice = [1, 2]
    saved(tmp_path, {"twice": [twice, twice], "deep": nested(60)})
    into: dict[str, object] = {"twice": [], "deep": []}
    restore(tmp_path, into=into)
    assert into == {"twice": [twice, twice], "deep": nested(60)}


def test_an_optimizers_state_that_contains_itself_is_refused_by_name(tmp_path: Path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.state[model.weight]["odd"] = circle()
    with Saver(tmp_path) as saver, pytest.raises(ConfigError, match="state of weight cannot be kept: odd is a dict"):
        saver.save({"m": model, "o": optimizer}, 1)


def test_groups_that_become_one_are_said(tmp_path: Path):
    model = nn.Linear(2, 2)
    apart = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.2}]
    saved(tmp_path, {"m": model, "o": torch.optim.SGD(apart, weight_decay=0.5)})
    one = torch.optim.SGD(model.parameters(), lr=0.3)
    restored = restore(tmp_path, into={"m": model, "o": one})
    assert restored.merged == ["lr of o"]
    assert "of several groups that are one here, the last one's count: lr of o" in str(restored)
    assert (one.param_groups[0]["lr"], one.param_groups[0]["weight_decay"]) == (0.1, 0.5)
    again = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.3)
    assert restore(tmp_path, into={"m": model, "o": again}).merged == []
