"""The private names of torch that this room uses. A torch that is too old, or lacks one, fails here, at import."""

# pyright: reportPrivateUsage=false, reportUnknownVariableType=false

import re
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed.distributed_c10d as c10d
from torch.utils._pytree import tree_map as tree_map

from argosy.core import ConfigError

__all__ = [
    "DTENSOR_SCATTER_MODULES",
    "SELF_RECORDING_BACKENDS",
    "can_reconfigure",
    "ddp_logging_data",
    "make_nccl",
    "profiler_enabled",
    "reconfigure_options",
    "tree_map",
]

TORCH_MIN = (2, 15)


def check_version(version: str) -> None:
    """Refuse a torch that is too old.

    Raises:
        ConfigError: it is.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and (int(found[1]), int(found[2])) < TORCH_MIN:
        raise ConfigError(
            f"this torch is too old for argosy.Run and the collectives: {version}",
            hint="install torch 2.15 or newer; `argosy run` starts scripts of any torch",
        )


check_version(torch.__version__)

DTENSOR_SCATTER_MODULES = ("torch.distributed.tensor._collective_utils", "torch.distributed.tensor.placement_types")
"""The modules that hold `mesh_scatter`."""

SELF_RECORDING_BACKENDS: set[str] = cast(Any, c10d)._FR_SELF_RECORDING_BACKENDS
profiler_enabled = cast(Any, torch.autograd)._profiler_enabled


def ddp_logging_data(model: Any) -> dict[str, Any]:
    return model._get_ddp_logging_data()


def can_reconfigure(group: Any) -> bool:
    """Whether a group was made with `enable_reconfigure=True`."""
    kinds = group._device_types
    return bool(kinds) and all(bool(group._get_backend(kind).options.enable_reconfigure) for kind in kinds)


def make_nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """An NCCL backend without a communicator, which `reconfigure` makes. Never run: no GPU was at hand."""
    from torch._C._distributed_c10d import ProcessGroupNCCL, ProcessGroupNCCL2

    options: Any = ProcessGroupNCCL.Options()
    options._timeout, options.enable_reconfigure = timeout, True
    return ProcessGroupNCCL2(store, rank, size, options, None)


def reconfigure_options(uuid: int, handles: list[str], timeout_s: float) -> Any:
    """What `reconfigure` takes: a number that no earlier call had, and one handle per rank, in their order."""
    options: Any = cast(Any, c10d).ReconfigureOptions()
    options.uuid, options.handles, options.timeout = uuid, handles, timedelta(seconds=timeout_s)
    return options
