"""Make DTensors while a group is joining: the rank takes its shard of its own whole tensor, without a scatter.

Torch scatters from the first rank of a mesh, which has not met this one yet. But every rank has the whole tensor, made
from the same seed.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import sys
from functools import wraps
from typing import Any

from argosy.collective import registry
from argosy.collective._torch import DTENSOR_SCATTER_MODULES


def scatter_locally() -> None:
    """Let `distribute_tensor` and `parallelize_module` work before the ranks have met; once is enough."""
    for name in DTENSOR_SCATTER_MODULES:
        module: Any = sys.modules.get(name)
        original = getattr(module, "mesh_scatter", None)
        if original is None or hasattr(original, "__wrapped__"):
            continue
        module.mesh_scatter = _locally(original)


def _locally(original: Any) -> Any:
    @wraps(original)
    def mesh_scatter(output: Any, scatter_list: Any, mesh: Any, mesh_dim: int = 0, *args: Any, **more: Any) -> Any:
        if not registry.state.joining or output.is_meta:
            return original(output, scatter_list, mesh, mesh_dim, *args, **more)
        output.copy_(scatter_list[mesh.get_local_rank(mesh_dim)])
        return None

    return mesh_scatter
