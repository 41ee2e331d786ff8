"""Restoring: ranks decide together, and stored tensors may have had other names and shapes."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import forked_calls
import pytest
import torch
from checkpoint import stubborn
from torch import nn

from argosy.checkpoint import CorruptShard, Saver, restore
from argosy.checkpoint.chunk_reader import Reading
from argosy.checkpoint.files import LocalFiles
from argosy.checkpoint.format import Entry
from argosy.checkpoint.step_index import all_chunks
from argosy.checkpoint.step_info import opened, verify
from argosy.core import ConfigError
from argosy.transfer import CHUNK_BYTES, whole


def test_one_ranks_failure_is_told_to_all(tmp_path: Path):
    forked_calls.run(stubborn.run, str(tmp_path), ranks=2, env={"ARGOSY_RUNTIME_DIR": str(tmp_path / "rt")})


class Model(nn.Module):
    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape)))


def trained(shapes: dict[str, tuple[int, ...]]) -> dict[str, object]:
    model = Model(shapes)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


OLD = {"qkv": (12, 4), "gate": (6, 4), "up": (6, 4), "e0": (3, 2), "e1": (3, 2), "t": (5, 7), "b": (4,)}
NEW = {"q": (8, 4), "k": (2, 4), "v": (2, 4), "both": (12, 4), "experts": (2, 3, 2), "turned": (7, 5), "bias": (4,)}


def remapped(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    q, k, v = tensors["qkv"].split((8, 2, 2))
    return {
        "q": q,
        "k": k,
        "v": v,
        "both": torch.cat([tensors["gate"], tensors["up"]]),
        "experts": torch.stack([tensors["e0"], tensors["e1"]]),
        "turned": tensors["t"].t(),
        "bias": tensors["b"],
    }


def test_split_fused_stacked_and_transposed_with_their_moments(tmp_path: Path):
    old, new = trained(OLD), trained(NEW)
    with Saver(tmp_path, sample=1) as saver:
        saver.save(old, 1).wait(300)
    restore(tmp_path, into=new, remap=remapped)

    def members(state: dict, key: str) -> dict[str, torch.Tensor]:
        named = state["model"].named_parameters()
        return {name: p.detach() if key == "" else state["optimizer"].state[p][key] for name, p in named}

    for key in ("", "exp_avg", "exp_avg_sq"):
        wanted = remapped(members(old, key))
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in members(new, key).items())
    assert {float(step) for step in members(new, "step").values()} == {1.0}


def test_a_remap_that_does_not_fit_is_an_error_and_changes_nothing(tmp_path: Path):
    old, new = trained(OLD), trained(NEW)
    before = {name: tensor.clone() for name, tensor in new["model"].state_dict().items()}
    with Saver(tmp_path, sample=1) as saver:
        saver.save(old, 1).wait(300)
    with pytest.raises(ConfigError, match=r"has shape \[4, 4\], here it is \[2, 4\]"):
        restore(tmp_path, into=new, remap=lambda given: remapped(given) | {"k": given["qkv"][:4]})
    with pytest.raises(ConfigError, match="remap= failed with parameters and buffers: KeyError: 'zz'"):
        restore(tmp_path, into=new, remap=lambda given: given["zz"])
    with pytest.raises(ConfigError, match="remap= returns a dict of tensors by name: Tensor"):
        restore(tmp_path, into=new, remap=lambda given: given["t"])
    with pytest.raises(ConfigError, match="remap= returns what is no tensor that can be kept: q: int"):
        restore(tmp_path, into=new, remap=lambda given: remapped(given) | {"q": 3})
    assert all(torch.equal(before[name], tensor) for name, tensor in new["model"].state_dict().items())


def flip(path: Path, entry: Entry) -> None:
    with open(path / "checkpoints" / entry.file, "r+b") as file:
        file.seek(entry.offset + 3)
        byte = file.read(1)[0]
        file.seek(entry.offset + 3)
        file.write(bytes([byte ^ 1]))


def adam(width: int = 64) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(width, width)
    return model, torch.optim.AdamW(model.parameters())


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(3, 64)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("damaged", ["weight", "weight::exp_avg", "bias::exp_avg_sq"])
def test_r3_damage_leaves_a_fresh_optimizer_and_its_model_as_they_were(tmp_path: Path, damaged: str):
    model, optimizer = adam()
    stepped(model, optimizer)
    with Saver(tmp_path) as saver:
        saver.save({"model": model, "optimizer": optimizer}, 1).wait()
    entry = next(each for each in opened(tmp_path, 1).entries if each.name == damaged)
    flip(tmp_path, entry)
    other, begun = adam()
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(CorruptShard, match=damaged):
        restore(tmp_path, {"model": other, "optimizer": begun}, step=1)
    assert all(torch.equal(before[name], tensor) for name, tensor in other.state_dict().items())
    assert not begun.state


def test_moments_go_into_an_optimizer_that_has_none_and_into_one_that_has(tmp_path: Path):
    model, optimizer = adam()
    stepped(model, optimizer)
    with Saver(tmp_path) as saver:
        saver.save({"model": model, "optimizer": optimizer}, 1).wait()
    for is_fresh in (True, False):
        other, second = adam()
        if not is_fresh:
            stepped(other, second)
        restore(tmp_path, {"model": other, "optimizer": second})
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            assert all(torch.equal(optimizer.state[a][key], second.state[b][key]) for key in optimizer.state[a])


def test_swapped_names_are_verified_whatever_they_were_called(tmp_path: Path):
    with Saver(tmp_path) as saver:
        saver.save({"a": torch.ones(8), "c": torch.full((8,), 3.0)}, 1).wait()
    entry = next(each for each in opened(tmp_path, 1).entries if each.name == "c")
    flip(tmp_path, entry)
    into = {"x": torch.zeros(8), "a": torch.zeros(8)}
    with pytest.raises(CorruptShard):
        restore(tmp_path, into, step=1, rename={"a": "x", "c": "a"})
    assert not into["x"].any()
    assert not into["a"].any()


def test_a_save_of_which_only_empty_tensors_are_new_is_whole(tmp_path: Path):
    model = nn.Linear(4, 4)
    model.register_buffer("cache", torch.empty(0))
    with Saver(tmp_path) as saver:
        for step in (1, 2, 3):
            saver.save({"model": model}, step, tag="final" if step == 3 else None).wait(300)
    for step in (1, 2, 3):
        found = restore(tmp_path, step=step)
        assert torch.equal(found.tensors["weight"], model.weight)
        assert found.tensors["cache"].shape == (0,)
    assert list(verify(tmp_path, None)) == []
    with Saver(tmp_path / "alone") as saver:
        saver.save({"e": torch.empty(0, 3)}, 1).wait(300)
    assert restore(tmp_path / "alone").tensors["e"].shape == (0, 3)
    assert list(verify(tmp_path / "alone", 1)) == []


def test_r3_an_empty_tensor_vouches_for_no_neighbour_at_its_place(tmp_path: Path):
    with Saver(tmp_path) as saver:
        for step in (1, 2):
            saver.save({"a_empty": torch.empty(0), "b_old": torch.full((100,), float(step))}, step).wait(300)
    entries = {each.name: each for each in opened(tmp_path, 2).entries}
    assert entries["a_empty"].offset == entries["b_old"].offset
    flip(tmp_path, entries["b_old"])
    into = {"a_empty": torch.empty(0), "b_new": torch.full((100,), -1.0)}
    with pytest.raises(CorruptShard):
        restore(tmp_path, into, step=2, rename={"b_old": "b_new"})
    assert torch.equal(into["b_new"], torch.full((100,), -1.0))
    assert restore(tmp_path, into, rename={"b_old": "b_new"}).step == 1
    assert torch.equal(into["b_new"], torch.ones(100))


def test_reads_are_planned_in_batches_that_grow_to_a_bound():
    entries = [
        Entry(name=f"{n}", key="value", unit=f"{n}", role="buffer", dtype="U8", shape=(CHUNK_BYTES,),
              box=whole((CHUNK_BYTES,)), file="step-000000000001-aa/rank-00000.safetensors", offset=n * CHUNK_BYTES,
              sums=["0" * 32])
        for n in range(1000)
    ]  # fmt: skip
    batches = list(Reading(LocalFiles(Path()), all_chunks(entries)).batches())
    assert [len(batch.groups) for batch in batches] == [32, 64, 128, 256, 256, 256, 8]


def test_plain_tensors_are_saved_and_restored_without_the_seconds_that_importing_dtensors_takes(tmp_path: Path):
    script = """
import sys, torch
from argosy.checkpoint import Saver, restore
model = torch.nn.Linear(2, 2)
before = set(sys.modules)
with Saver(sys.argv[1]) as saver:
    saver.save(model, 1)
restore(sys.argv[1], into=model)
print([name for name in set(sys.modules) - before if name.startswith(("torch", "sympy"))])
"""
    ended = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=300, check=True
    )
    assert ended.stdout == "[]\n", ended.stdout


@pytest.mark.parametrize("around", [torch.device("meta"), torch.inference_mode()])
def test_whatever_the_caller_is_in_tensors_have_memory_and_moments_can_be_trained(tmp_path: Path, around: Any):
    def trained() -> dict[str, Any]:
        model = nn.Linear(3, 2)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "extra": {"t": torch.ones(2)}}

    def step(state: dict[str, Any]) -> None:
        state["optimizer"].zero_grad()
        state["model"](torch.ones(1, 3)).sum().backward()
        state["optimizer"].step()

    saved, here = trained(), trained()
    step(saved)
    with Saver(tmp_path) as saver:
        saver.save(saved, 1)
    with around:
        restore(tmp_path, into=here)
        found = restore(tmp_path).tensors
    assert torch.equal(here["model"].weight, saved["model"].weight)
    assert torch.equal(found["weight"], saved["model"].weight)
    assert not found["weight"].is_inference()
    step(here)
    step(saved)
    assert torch.equal(here["model"].weight, saved["model"].weight)
