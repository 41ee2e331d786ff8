"""One of two ranks with 8-bit moments, saved in one layout and restored in others."""

import os
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
from argosy.transfer import UnalignedBlocks, describe

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


def refusal(directory: Path, made: nn.Module, coder: Coder) -> str:
    try:
        restore(directory, into={"m": made, "o": coder})
    except UnalignedBlocks as error:
        return str(error)
    return ""


def main(directory: Path) -> None:
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(directory / "store"), 2), rank=int(os.environ["RANK"]), world_size=2
    )
    for saved in (0, 1, None):
        made, coder = module(saved)
        gradient = torch.randn(SHAPE, generator=torch.Generator().manual_seed(3)) * torch.logspace(-3, 3, 32)
        made.w.grad = gradient if saved is None else distribute_tensor(gradient, made.w.device_mesh, made.w.placements)
        coder.step()
        kept = moment(made, coder)
        run = directory / str(saved)
        with Saver(run, sample=1) as saver:
            saver.save({"m": made, "o": coder}, 1).wait(60)
        for wanted in (0, 1, None):
            there, other = module(wanted)
            is_exact = (saved == 1) == (wanted == 1)
            said = refusal(run, there, other)
            assert bool(said) != is_exact, (saved, wanted, said)
            if not is_exact:
                assert not other.state[there.w], "nothing is made of what is refused"
                restored = restore(run, into={"m": there, "o": other}, requantize=True)
                assert restored.requantised == ["w::moment.scale"]
                assert "quantised anew" in str(restored)
            found = moment(there, other)
            assert torch.equal(torch.as_tensor(there.w.full_tensor() if wanted is not None else there.w), full_w(made))
            local = getattr(other.state[there.w]["moment"], "_local_tensor", other.state[there.w]["moment"])
            assert isinstance(local, Coded)
            worst = (found - kept).abs().max() / kept.abs().max()
            assert worst == 0 if is_exact else 0 < worst < 0.01, (saved, wanted, worst)
    check_first_fsdp()


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
