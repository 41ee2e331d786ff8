"""Moments of 8 bits, in tensors that consist of other tensors."""

import json
import sys
from pathlib import Path

import forked_calls
import pytest
import torch
from checkpoint.coded import Coded, Coder, coded
from torch import nn

from argosy.checkpoint import Saver, export, import_, restore
from argosy.core import ConfigError
from argosy.transfer import describe
from argosy.transfer.torch_wrapped import noted, rebuilt


def grown() -> tuple[nn.Module, Coder]:
    model = nn.Linear(64, 4, bias=False)
    coder = Coder(model.parameters())
    model.weight.grad = torch.randn(4, 64, generator=torch.Generator().manual_seed(2))
    coder.step()
    return model, coder


def test_a_tensor_of_tensors_comes_back_bitwise_into_an_optimizer_that_has_none(tmp_path: Path):
    model, coder = grown()
    with Saver(tmp_path, sample=1) as saver:
        saver.save({"m": model, "o": coder}, 1).wait(300)
    other = nn.Linear(64, 4, bias=False)
    second = Coder(other.parameters())
    restore(tmp_path, into={"m": other, "o": second})
    old, new = coder.state[model.weight]["moment"], second.state[other.weight]["moment"]
    assert type(new) is Coded
    assert list(second.state[other.weight]) == ["moment"]
    assert all(torch.equal(getattr(old, part), getattr(new, part)) for part in ("codes", "scale", "qmap"))
    assert set(restore(tmp_path).tensors) == {"weight", *(f"weight::moment.{p}" for p in ("codes", "scale", "qmap"))}


def test_it_comes_back_into_the_memory_of_one_that_is_there(tmp_path: Path):
    model, coder = grown()
    with Saver(tmp_path, sample=1) as saver:
        saver.save({"m": model, "o": coder}, 1).wait(300)
    moment = coder.state[model.weight]["moment"]
    kept, moment.codes[:] = moment.codes.clone(), 0
    restore(tmp_path, into={"m": model, "o": coder})
    assert coder.state[model.weight]["moment"] is moment
    assert torch.equal(moment.codes, kept)


@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_it_comes_back_by_way_of_others_formats(tmp_path: Path, kind: str):
    model, coder = grown()
    with Saver(tmp_path / "a", sample=1) as saver:
        saver.save({"m": model, "o": coder}, 1).wait(300)
    export(tmp_path / "a", kind, tmp_path / "b")
    import_(kind, tmp_path / "b", tmp_path / "c")
    other = nn.Linear(64, 4, bias=False)
    second = Coder(other.parameters())
    restore(tmp_path / "c", into={"m": other, "o": second})
    old, new = coder.state[model.weight]["moment"], second.state[other.weight]["moment"]
    assert all(torch.equal(getattr(old, part), getattr(new, part)) for part in ("codes", "scale", "qmap"))


def test_its_class_is_not_imported_by_who_restores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model, coder = grown()
    with Saver(tmp_path, sample=1) as saver:
        saver.save({"m": model, "o": coder}, 1).wait(300)
    monkeypatch.delitem(sys.modules, "checkpoint.coded")
    other = nn.Linear(64, 4, bias=False)
    with pytest.raises(ConfigError, match=r"stored as a Coded of checkpoint\.coded, which is not imported here"):
        restore(tmp_path, into={"m": other, "o": Coder(other.parameters())})
    assert "checkpoint.coded" not in sys.modules


def test_a_parameter_that_consists_of_others_is_refused_by_name():
    model = nn.Module()
    model.weight = nn.Parameter(coded(torch.ones(64)), requires_grad=False)
    with pytest.raises(ConfigError, match="weight cannot be kept: a Coded consists of other tensors"):
        describe(model)


QUANTISED = """
import sys
from pathlib import Path
from checkpoint.scripts.quantised import main
main(Path(sys.argv[1]))
"""


def test_ranks_get_blocks_exact_or_are_refused_by_name(tmp_path: Path):
    forked_calls.run(QUANTISED, tmp_path, ranks=2)


@pytest.mark.parametrize("context", [None, 7, "abc", (1, 2), {"scale": 0.5, "bits": 8}, [float("inf"), [(8, 8)]]])
def test_what_a_tensor_of_tensors_has_beside_them_is_kept(context: object):
    note = noted("w::moment", Contextual(torch.ones(8, 8), context))
    again = rebuilt("w::moment", json.loads(json.dumps(note)), {"part": torch.ones(8, 8)}, torch.Size((8, 8)))
    assert again.context == context
    assert type(again.context) is type(context)


class Contextual(torch.Tensor):
    """A tensor of one other, and something."""

    @staticmethod
    def __new__(cls, part: torch.Tensor, context: object) -> "Contextual":
        return torch.Tensor._make_wrapper_subclass(cls, part.shape, dtype=part.dtype)

    def __init__(self, part: torch.Tensor, context: object) -> None:
        self.part, self.context = part, context

    def __tensor_flatten__(self) -> tuple[list[str], object]:
        return ["part"], self.context

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: object, *_: object) -> "Contextual":
        return cls(inner["part"], context)

    @classmethod
    def __torch_dispatch__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> object:
        return cls(args[0].part, args[0].context)  # type: ignore[index]


def stateful(context: object) -> dict[str, object]:
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters())
    if context != "none yet":
        optimizer.state[model.weight] = {"momentum_buffer": Contextual(torch.rand(2, 2), context)}
    return {"m": model, "o": optimizer}


def test_a_wrapper_of_one_tensor_keeps_its_class_and_must_mean_the_same(tmp_path: Path):
    with Saver(tmp_path, sample=1) as saver:
        saver.save(stateful("a"), 1).wait(300)
    into = stateful("none yet")
    restore(tmp_path, into=into)
    moment = into["o"].state[into["m"].weight]["momentum_buffer"]
    assert (type(moment), moment.context) == (Contextual, "a")
    with pytest.raises(ConfigError, match=r"stored as .*:Contextual of .*'a'.*, here it is of .*'b'"):
        restore(tmp_path, into=stateful("b"))
