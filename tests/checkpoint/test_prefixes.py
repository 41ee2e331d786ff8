"""A dict to which a module is added, or of which one is left out, finds its tensors by the names that they had."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from argosy.checkpoint import Saver, restore
from argosy.core import ConfigError


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def trained(seed: int) -> dict[str, Any]:
    model = network(seed)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def save(path: Path, state: Any) -> None:
    with Saver(path) as saver:
        saver.save(state, 1)


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_a_module_that_is_new_leaves_the_others_their_names(tmp_path: Path):
    saved = trained(0)
    save(tmp_path, {**saved, "epoch": 3, "extra": torch.ones(3)})
    average = network(2)
    here = {**trained(1), "average": average, "epoch": 0, "extra": torch.zeros(3)}
    restored = restore(tmp_path, into=here, partial=True)
    assert equal(here["model"], saved["model"])
    assert equal(average, network(2)), "it was not stored"
    moments = [each["optimizer"].state[each["model"][0].weight]["exp_avg"] for each in (here, saved)]
    assert torch.equal(*moments)
    assert (here["epoch"], here["extra"].tolist(), restored.unused) == (3, [1, 1, 1], [])
    assert {name.partition(".")[0] for name in restored.kept} == {"average"}


@pytest.mark.parametrize("key", ["model", "average"])
def test_one_of_several_modules_is_restored_alone(tmp_path: Path, key: str):
    saved = {**trained(0), "average": network(5)}
    save(tmp_path, saved)
    here = network(9)
    restore(tmp_path, into={key: here}, partial=True, fresh=True)
    assert equal(here, saved[key])


class Outer(nn.Module):
    """With one inside that has the name of its own key."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(3))
        self.model = nn.Module()
        self.model.weight = nn.Parameter(torch.randn(3))


def test_a_module_inside_of_the_same_name_is_not_taken_for_it(tmp_path: Path):
    save(tmp_path / "one", {"model": Outer(0)})
    here, other = Outer(1), network(1)
    restore(tmp_path / "one", into={"model": here, "other": other}, partial=True)
    assert equal(here, Outer(0))
    save(tmp_path / "two", {"model": Outer(3), "other": Outer(4)})
    restore(tmp_path / "two", into={"other": here}, partial=True)
    assert equal(here, Outer(4))


def test_single_parameters_keep_their_names(tmp_path: Path):
    save(tmp_path, {"model": network(0), "scale": nn.Parameter(torch.ones(2))})
    here = {"model": network(1), "scale": nn.Parameter(torch.zeros(2)), "other": network(2)}
    restore(tmp_path, into=here, partial=True)
    assert equal(here["model"], network(0))
    assert here["scale"].tolist() == [1, 1]


def test_a_module_alone_fits_the_only_one_of_its_names(tmp_path: Path):
    save(tmp_path, network(0))
    here = {"model": network(1), "other": nn.Bilinear(2, 2, 2)}
    restore(tmp_path, into=here, partial=True)
    assert equal(here["model"], network(0))


@pytest.mark.parametrize(("stored", "here"), [(["x"], ["a", "b"]), (["a", "b"], ["x"])])
def test_what_may_be_there_by_another_name_is_not_left_as_it_was(tmp_path: Path, stored: list[str], here: list[str]):
    save(tmp_path, {"extra": torch.ones(2), **{key: network(0) for key in stored}})
    into = {"extra": torch.zeros(2), **{key: network(3) for key in here}}
    with pytest.raises(ConfigError, match=rf"nothing is stored for {here[0]}, but .*0\.bias is"):
        restore(tmp_path, into=into, partial=True)
    assert into["extra"].tolist() == [0, 0]
