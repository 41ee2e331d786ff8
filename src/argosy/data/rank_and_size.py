"""Which rank loads data in this process, and of how many."""

import sys
from typing import Any, cast

from argosy.fabric import here


def rank_and_size() -> tuple[int, int]:
    """This process's rank and the number of ranks: from torch's process group if there is one, else the launcher."""
    distributed = cast(Any, sys.modules.get("torch.distributed"))
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    place = here()
    return place.rank.index, place.size
