"""How DTensors are made while a group is joining: every rank takes its part of what it has itself.

Only the first rank of a mesh gives torch's scatter what to send, so that a rank alone could not answer for it. But all
ranks have the whole tensor when it is distributed, and made it from the same seed.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import sys
from functools import wraps
from typing import Any

from argosy.collective import registry

_MODULES = ("torch.distributed.tensor._collective_utils", "torch.distributed.tensor.placement_types")


def scatter_locally() -> None:
    """Let `distribute_tensor` and `parallelize_module` work before the ranks have met; once is enough."""
    for name in _MODULES:
        module: Any = sys.modules.get(name)
        original = getattr(module, "mesh_scatter", None)
        if original is None or hasattr(original, "__wrapped__"):
            continue
        module.mesh_scatter = _locally(original)


def _locally(original: Any) -> Any:
    @wraps(original)
    def mesh_scatter(output: Any, scatter_list: Any, mesh: Any, mesh_dim: int = 0, *args: Any, **more: Any) -> Any:
        if not registry.joining() or output.is_meta:
            return original(output, scatter_list, mesh, mesh_dim, *args, **more)
        output.copy_(scatter_list[mesh.get_local_rank(mesh_dim)])
        return None

    return mesh_scatter
