"""Moments of 8 bits: in tensors of their own kind, in blocks that a cut may fall into."""

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
from argosy.transfer import Blocks, Split, UnalignedBlocks, describe, sharded
from argosy.transfer.torch_wrapped import check_cut, noted, rebuilt


def grown() -> tuple[nn.Module, Coder]:
    model = nn.Linear(64, 4, bias=False)
    coder = Coder(model.parameters())
    model.weight.grad = torch.randn(4, 64, generator=torch.Generator().manual_seed(2))
    coder.step()
    return model, coder


def test_a_tensor_of_tensors_comes_back_bitwise_into_an_optimizer_that_has_none(tmp_path: Path):
    model, coder = grown()
    with Saver(tmp_path, sample=1) as saver:
        saver.save({"m": model, "o": coder}, 1).wait(30)
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
        saver.save({"m": model, "o": coder}, 1).wait(30)
    moment = coder.state[model.weight]["moment"]
    kept, moment.codes[:] = moment.codes.clone(), 0
    restore(tmp_path, into={"m": model, "o": coder})
    assert coder.state[model.weight]["moment"] is moment
    assert torch.equal(moment.codes, kept)


@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_it_comes_back_by_way_of_others_formats(tmp_path: Path, kind: str):
    model, coder = grown()
    with Saver(tmp_path / "a", sample=1) as saver:
        saver.save({"m": model, "o": coder}, 1).wait(30)
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
        saver.save({"m": model, "o": coder}, 1).wait(30)
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


class Blocky(torch.optim.Optimizer):
    """A code of 8 bits for each cell, and a scale for each block of the size that it is made with."""

    def __init__(self, parameters: object, size: int) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.size = size

    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                blocks = parameter.grad.flatten().view(-1, self.size)
                scales = blocks.abs().amax(1)
                codes = (blocks / scales[:, None] * 127).round().to(torch.int8).view_as(parameter)
                self.state[parameter] = {"codes": codes, "scales": scales}

    def numbers(self, parameter: torch.Tensor) -> torch.Tensor:
        state = self.state[parameter]
        return (state["codes"].view(-1, self.size) / 127 * state["scales"][:, None]).view_as(parameter)

    def blocks(self) -> dict[str, Blocks]:
        return {"scales": Blocks(self.size, codes="codes", book=tuple(code / 127 for code in range(-128, 128)))}


def saved_blocks(directory: Path) -> torch.Tensor:
    model = nn.Linear(8, 4, bias=False)
    optimizer = Blocky(model.parameters(), 8)
    model.weight.grad = torch.randn(4, 8, generator=torch.Generator().manual_seed(5))
    optimizer.step()
    with Saver(directory, sample=1) as saver:
        saver.save(describe(model, optimizer, blocks=optimizer.blocks()), 1).wait(30)
    return optimizer.numbers(model.weight)


def test_another_block_size_is_refused_unless_it_is_asked_for(tmp_path: Path):
    numbers = saved_blocks(tmp_path)
    model = nn.Linear(8, 4, bias=False)
    optimizer, before = Blocky(model.parameters(), 4), model.weight.clone()
    into = describe(model, optimizer, blocks=optimizer.blocks())
    with pytest.raises(UnalignedBlocks, match="other blocks than are here: weight::scales"):
        restore(tmp_path, into=into)
    assert torch.equal(model.weight, before)
    assert not optimizer.state[model.weight]
    restored = restore(tmp_path, into=into, requantize=True)
    assert "quantised anew, as blocks are cut otherwise here: weight::scales" in str(restored)
    assert optimizer.state[model.weight]["scales"].shape == (8,)
    assert torch.allclose(optimizer.numbers(model.weight), numbers, atol=float(numbers.abs().max()) / 254)


def test_blocks_without_a_book_cannot_be_quantised_anew(tmp_path: Path):
    saved_blocks(tmp_path)
    model = nn.Linear(8, 4, bias=False)
    into = describe(model, Blocky(model.parameters(), 4), blocks={"scales": 4})
    with pytest.raises(UnalignedBlocks, match="blocks of 8 cells in 1 parts, here they are of 4"):
        restore(tmp_path, into=into, requantize=True)


def test_a_wrong_block_size_is_refused():
    model = nn.Linear(8, 4, bias=False)
    optimizer = Blocky(model.parameters(), 8)
    model.weight.grad = torch.ones(4, 8)
    optimizer.step()
    with pytest.raises(ConfigError, match="weight::scales has 4 values, for blocks of 16 cells it would have 2"):
        describe(model, optimizer, blocks={"scales": 16})


QUANTISED = """
import sys
from pathlib import Path
from checkpoint.scripts.quantised import main
main(Path(sys.argv[1]))
"""


def test_ranks_that_cut_blocks_otherwise_get_them_exact_or_anew(tmp_path: Path):
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
        saver.save(stateful("a"), 1).wait(30)
    into = stateful("none yet")
    restore(tmp_path, into=into)
    moment = into["o"].state[into["m"].weight]["momentum_buffer"]
    assert (type(moment), moment.context) == (Contextual, "a")
    with pytest.raises(ConfigError, match=r"stored as .*:Contextual of .*'a'.*, here it is of .*'b'"):
        restore(tmp_path, into=stateful("b"))


@pytest.mark.parametrize("book", [(1.0,) * 255, (1.0,) * 257, ()])
def test_a_book_without_a_value_for_each_code_is_refused_before_anything_is_written(tmp_path: Path, book: object):
    saved_blocks(tmp_path)
    model = nn.Linear(8, 4, bias=False)
    before = model.weight.clone()
    into = describe(model, Blocky(model.parameters(), 4), blocks={"scales": Blocks(4, codes="codes", book=book)})
    with pytest.raises(UnalignedBlocks, match="here they are of 4"):
        restore(tmp_path, into=into, requantize=True)
    assert torch.equal(model.weight, before)
    with pytest.raises(ConfigError, match="a book has finite values"):
        Blocks(4, "codes", (float("nan"),) * 256)


@pytest.mark.parametrize("blocks", [Blocks(8, codes="typo"), Blocks(8, codes="codes", book="typo")])
def test_blocks_that_name_what_is_not_there_are_refused(blocks: Blocks):
    model = nn.Linear(8, 4, bias=False)
    optimizer = Blocky(model.parameters(), 8)
    model.weight.grad = torch.ones(4, 8)
    optimizer.step()
    with pytest.raises(ConfigError, match="Blocks of weight::scales name 'typo'"):
        describe(model, optimizer, blocks={"scales": blocks})


def test_a_rank_without_whole_blocks_is_named():
    """There torchao keeps plain numbers, and codes elsewhere."""
    inner = {"codes": torch.zeros(32, 128, dtype=torch.uint8), "scale": torch.zeros(16)}
    with pytest.raises(ConfigError, match=r"w::exp_avg cannot be kept: .* blocks of 256 cells.* rank 0 has 4224"):
        check_cut("w::exp_avg", inner, sharded((65, 128), (2,), (Split(0),)))
