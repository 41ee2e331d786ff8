"""Restoring: ranks decide together, and stored tensors may have had other names and shapes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import argosy
from argosy.checkpoint import Saver, restore
from argosy.core import ConfigError
from argosy.transfer import Fused, Remap, Renamed, SplitUp, Stacked, Transposed


def test_one_ranks_failure_is_told_to_all(tmp_path: Path):
    env = os.environ | {
        "PYTHONPATH": str(Path(argosy.__file__).parents[1]),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "ARGOSY_RUNTIME_DIR": str(tmp_path / "rt"),
    }
    script = Path(__file__).with_name("stubborn.py")
    ended = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], env=env, capture_output=True, text=True, timeout=110
    )
    assert ended.returncode == 0, ended.stderr


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
REMAP = Remap((
    SplitUp("qkv", ("q", "k", "v"), (8, 2, 2)),
    Fused(("gate", "up"), "both"),
    Stacked(("e0", "e1"), "experts"),
    Transposed("t", "turned", (1, 0)),
    Renamed("b", "bias"),
))  # fmt: skip


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
        saver.save(old, 1).wait(30)
    restore(tmp_path, into=new, remap=REMAP)

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
        saver.save(old, 1).wait(30)
    short = Remap((*REMAP.rules[1:], SplitUp("qkv", ("q", "k", "v"), (4, 4, 4))))
    with pytest.raises(ConfigError, match=r"has shape \[4, 4\], here it is \[2, 4\]"):
        restore(tmp_path, into=new, remap=short)
    with pytest.raises(ConfigError, match="not stored: zz"):
        restore(tmp_path, into=new, remap=Remap((Renamed("zz", "q"),)))
    assert all(torch.equal(before[name], tensor) for name, tensor in new["model"].state_dict().items())
