"""One of two ranks with 8-bit moments, saved in one layout and restored in others."""

import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from checkpoint.coded import Coded, Coder
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from argosy.checkpoint import Saver, restore
from argosy.core import ConfigError
from argosy.transfer import describe

SHAPE = (64, 32)


def module(dim: int | None) -> tuple[nn.Module, Coder]:
    """A parameter cut along a dimension; None: not."""
    made = nn.Module()
    full = torch.arange(64 * 32.0).view(SHAPE)
    mesh = init_device_mesh("cpu", (2,))
    made.w = nn.Parameter(full if dim is None else distribute_tensor(full, mesh, [Shard(dim)]))
    return made, Coder(made.parameters())


def moment(made: nn.Module, coder: Coder) -> torch.Tensor:
    """The whole of it, as numbers."""
    state = coder.state[made.w]["moment"]
    if not isinstance(state, DTensor):
        return state.dequantize()
    numbers = DTensor.from_local(state._local_tensor.dequantize(), state.device_mesh, state.placements)
    return numbers.full_tensor()


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except ConfigError as error:
        return str(error)
    return ""


def trained(dim: int | None) -> tuple[nn.Module, Coder]:
    made, coder = module(dim)
    gradient = torch.randn(SHAPE, generator=torch.Generator().manual_seed(3)) * torch.logspace(-3, 3, 32)
    made.w.grad = gradient if dim is None else distribute_tensor(gradient, made.w.device_mesh, made.w.placements)
    coder.step()
    return made, coder


def main(directory: Path) -> None:
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(directory / "store"), 2), rank=int(os.environ["RANK"]), world_size=2
    )
    columns = trained(1)
    assert "blocks of 64 cells are cut" in refusal(lambda: describe(*columns))
    for saved in (0, None):
        made, coder = trained(saved)
        kept = moment(made, coder)
        run = directory / str(saved)
        with Saver(run, sample=1, replicated=["*"] if saved is None else []) as saver:
            saver.save({"m": made, "o": coder}, 1).wait(300)
        there, other = module(1)
        assert "blocks of 64 cells are cut" in refusal(lambda: restore(run, into={"m": there, "o": other}))  # noqa: B023
        assert not other.state[there.w], "nothing is made of what is refused"
        for wanted in (0, None):
            there, other = module(wanted)
            restore(run, into={"m": there, "o": other})
            assert torch.equal(torch.as_tensor(there.w.full_tensor() if wanted is not None else there.w), full_w(made))
            local = getattr(other.state[there.w]["moment"], "_local_tensor", other.state[there.w]["moment"])
            assert isinstance(local, Coded)
            assert torch.equal(moment(there, other), kept), (saved, wanted)
    check_first_fsdp()
    made, _ = module(0)
    scaled = torch.optim.SGD(made.parameters())
    scaled.state[made.w] = {"codes": torch.zeros_like(made.w, dtype=torch.int8), "scales": torch.ones(16)}
    assert "w::scales cannot be kept: its parameter is cut" in refusal(lambda: describe(made, scaled))


def check_first_fsdp() -> None:
    """Its shards do not say that they are: each would be taken for the whole."""
    said = ""
    try:
        describe(FullyShardedDataParallel(nn.Linear(8, 8, bias=False), device_id=torch.device("cpu")))
    except ConfigError as error:
        said = str(error)
    assert "the module is a FullyShardedDataParallel" in said, said


def full_w(made: nn.Module) -> torch.Tensor:
    return made.w.full_tensor() if isinstance(made.w, DTensor) else made.w
