"""Register the backend `argosy` with torch, and let a replacement's groups begin in the state "joining"."""

# pyright: reportUnknownMemberType=false

from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from argosy.collective import registry
from argosy.collective._torch import SELF_RECORDING_BACKENDS
from argosy.collective.group import Group
from argosy.collective.local_scatter import scatter_locally


def register() -> None:
    """Make `init_process_group("argosy")` work; once is enough."""
    if "argosy" not in dist.Backend.backend_list:
        dist.Backend.register_backend("argosy", _make, extended_api=True, devices=["cpu"])
        SELF_RECORDING_BACKENDS.add("argosy")  # Torch would attach a recorder, which fails on a group in Python.


def _make(opts: Any, _options: Any = None) -> Group:
    if registry.state.joining:
        scatter_locally()
    ranks = list(opts.global_ranks_in_group) or list(range(opts.group_size))
    timeout = opts.timeout if isinstance(opts.timeout, timedelta) else timedelta(minutes=30)
    return Group(opts.store, opts.group_rank, opts.group_size, ranks, timeout)


@contextmanager
def joining() -> Generator[None]:
    """Let groups made in this block begin in the state "joining", for a replacement rank; `reform` makes them live."""
    registry.state.joining = True
    scatter_locally()
    try:
        yield
    finally:
        registry.state.joining = False


def meet_when_needed(meet: Callable[[], None] | None) -> None:
    """Have groups that are joining call `meet`, which forms them, before their first operation; None: none does."""
    registry.state.meet = meet
