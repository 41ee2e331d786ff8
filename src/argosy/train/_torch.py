"""The private names of torch that this room uses. A torch that lacks one fails here, at import."""

# pyright: reportPrivateUsage=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from typing import Any, cast

import torch
import torch.distributed.distributed_c10d as c10d

current_graph_task_id: Any = cast(Any, torch)._C._current_graph_task_id
"""Which backward pass the calling thread is in; -1 if it is in none."""
default_store: Any = cast(Any, c10d)._get_default_store
"""The store that the default process group was made with."""


def was_forwarded(module: Any) -> bool:
    """Whether a module that FSDP2 shards has been in a forward pass, as the outermost one."""
    return bool(module._get_fsdp_state()._is_root)
