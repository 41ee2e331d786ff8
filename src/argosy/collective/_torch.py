"""The private names of torch that this room uses: a torch without one of them fails here, at import."""

# pyright: reportPrivateUsage=false, reportUnknownVariableType=false

from typing import Any, cast

import torch
import torch.distributed.distributed_c10d as c10d
from torch.utils._pytree import tree_map as tree_map

__all__ = ["DTENSOR_SCATTER_MODULES", "SELF_RECORDING_BACKENDS", "ddp_logging_data", "profiler_enabled", "tree_map"]

DTENSOR_SCATTER_MODULES = ("torch.distributed.tensor._collective_utils", "torch.distributed.tensor.placement_types")
"""The modules that hold `mesh_scatter`."""

SELF_RECORDING_BACKENDS: set[str] = cast(Any, c10d)._FR_SELF_RECORDING_BACKENDS
profiler_enabled = cast(Any, torch.autograd)._profiler_enabled


def ddp_logging_data(model: Any) -> dict[str, Any]:
    return model._get_ddp_logging_data()
