"""How torch gets our groups, and how a newcomer's begin."""

# pyright: reportUnknownMemberType=false, reportPrivateUsage=false

from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from argosy.collective import registry
from argosy.collective.group import Group
from argosy.collective.scattering import scatter_locally


def register() -> None:
    """Make `init_process_group("argosy")` work; once is enough."""
    if "ARGOSY" not in dist.Backend._plugins:
        dist.Backend.register_backend("argosy", _make, extended_api=True, devices=["cpu"])
        # Torch attaches a recorder to groups, which fails on one that is no group of C++ with backends inside.
        dist.distributed_c10d._FR_SELF_RECORDING_BACKENDS.add("argosy")


def _make(opts: Any, _options: Any = None) -> Group:
    if registry.joining():
        scatter_locally()
    ranks = list(opts.global_ranks_in_group) or list(range(opts.group_size))
    timeout = opts.timeout if isinstance(opts.timeout, timedelta) else timedelta(minutes=30)
    return Group(opts.store, opts.group_rank, opts.group_size, ranks, timeout)


@contextmanager
def joining() -> Generator[None]:
    """Groups made in this block begin alone, for a rank that replaces another: they go live with `reform`."""
    registry.set_joining(True)
    scatter_locally()
    try:
        yield
    finally:
        registry.set_joining(False)
