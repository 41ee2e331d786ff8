"""A dict to which a module is added, or of which one is left out, finds its tensors by the names that they had."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from argosy.checkpoint import Saver, export, import_, restore
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


@pytest.mark.parametrize("wish", [{"partial": True}, {"roles": {"parameter", "buffer"}}])
def test_a_dict_of_tensors_that_is_called_as_the_module_goes_into_it(tmp_path: Path, wish: dict[str, Any]):
    state, average = trained(0), network(7)
    save(tmp_path, {**state, "average": {name: each.detach() for name, each in average.named_parameters()}})
    here = network(9)
    restore(tmp_path, into={"average": here}, fresh=True, **wish)
    assert equal(here, average)


@pytest.mark.parametrize("keys", [["model", "ema"], ["ema"], ["model"]])
def test_what_others_saved_of_several_modules_finds_them(tmp_path: Path, keys: list[str]):
    saved = {"model": network(0), "ema": network(1)}
    torch.save({key: each.state_dict() for key, each in saved.items()}, tmp_path / "others.pt")
    import_("torch", tmp_path / "others.pt", tmp_path / "run")
    here = {key: network(5) for key in keys}
    restore(tmp_path / "run", into=here, partial=len(keys) < 2, fresh=True)
    assert all(equal(here[key], saved[key]) for key in keys)


class Counted(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), float(count)))
        self.count = count

    def get_extra_state(self) -> dict[str, object]:
        return {"count": self.count, "tensor": torch.tensor([self.count])}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.count = state["count"] + 100 * int(state["tensor"])


def test_extra_state_goes_with_its_module(tmp_path: Path):
    save(tmp_path / "two", {"model": nn.Sequential(Counted(1)), "ema": nn.Sequential(Counted(2))})
    here = nn.Sequential(Counted(9))
    restore(tmp_path / "two", into={"ema": here}, partial=True)
    assert (here[0].count, here[0].weight.tolist()) == (202, [2, 2])
    save(tmp_path / "one", {"model": nn.Sequential(Counted(3))})
    here = nn.Sequential(Counted(9))
    restore(tmp_path / "one", into={"model": here, "ema": nn.Sequential(Counted(8))}, partial=True)
    assert (here[0].count, here[0].weight.tolist()) == (303, [3, 3])


def test_of_the_wanted_roles_nothing_may_lack(tmp_path: Path):
    save(tmp_path, {"model": nn.Sequential(nn.Linear(2, 2)), "extra": torch.ones(1)})
    more = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"not stored: 1\.bias, 1\.weight"):
        restore(tmp_path, into=more, roles={"parameter", "buffer"}, fresh=True)
    restore(tmp_path, into=more, roles={"parameter", "buffer"}, fresh=True, partial=True)
    restore(tmp_path, into=nn.Sequential(nn.Linear(2, 2)), roles={"parameter", "buffer"}, fresh=True)


def test_of_several_modules_one_goes_to_hugging_face(tmp_path: Path):
    saved = {"model": network(0), "ema": network(1)}
    save(tmp_path / "run", saved)
    for key, module in (("model", None), ("ema", "ema")):
        export(tmp_path / "run", "hf", tmp_path / key, module=module)
        import_("hf", tmp_path / key, tmp_path / f"again-{key}")
        here = network(5)
        restore(tmp_path / f"again-{key}", into=here, fresh=True)
        assert equal(here, saved[key])
    save(tmp_path / "gan", {"G": network(0), "D": network(1)})
    with pytest.raises(ConfigError, match=r"which module is exported\? There are G, D"):
        export(tmp_path / "gan", "hf", tmp_path / "out")
    with pytest.raises(ConfigError, match="no module is called 'X'"):
        export(tmp_path / "gan", "hf", tmp_path / "out", module="X")
    assert not (tmp_path / "out").exists()
