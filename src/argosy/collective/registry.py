"""The argosy groups of this process, in the order in which they were made, and the latch that covers them."""
# pyright: reportPrivateImportUsage=false

import os
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from argosy.collective.wire import CollectiveMismatch
from argosy.core import ConfigError, PeerLost

if TYPE_CHECKING:
    from argosy.collective.group import Group
    from argosy.collective.latch import Latch

_groups: "list[weakref.ref[Group]]" = []
_made: Counter[tuple[int, ...]] = Counter()
_lock = threading.Lock()
_latch: "Latch | None" = None
_joining = False


def add(group: "Group") -> None:
    with _lock:
        _groups.append(weakref.ref(group))


def own_store(store: Any, ranks: Sequence[int]) -> Any:
    """Where a new group of these ranks meets: one that was destroyed has left its keys in the same store.

    All ranks of a group make as many of them, in the same order.
    """
    with _lock:
        _made[tuple(ranks)] += 1
        return dist.PrefixStore(f"argosy/{_made[tuple(ranks)]}", store)


def is_one_lost(ranks: Sequence[int]) -> bool:
    """False, or else the loss of one of these ranks of the world that a group of this process knows of is raised."""
    names = {f"rank {rank}" for rank in ranks}
    for group in groups():
        group.look()
        if isinstance(group.loss, PeerLost) and group.loss.peer in names:
            raise group.loss
    return False


def remove(group: "Group") -> None:
    with _lock:
        _groups[:] = [held for held in _groups if held() not in (group, None)]


def groups() -> "list[Group]":
    with _lock:
        found = [held() for held in _groups]
    return [group for group in found if group is not None]


def latch() -> "Latch | None":
    """The latch that is set now, if any."""
    return _latch


def set_latch(value: "Latch | None") -> None:
    global _latch
    _latch = value


def joining() -> bool:
    """Whether groups made now begin alone."""
    return _joining


def set_joining(value: bool) -> None:
    global _joining
    _joining = value


def kept_back(error: BaseException) -> BaseException | None:
    """None for a mismatch inside a latch, whose vote raises it: DDP's reducer bears no exception; else the error."""
    held = latch()
    if not isinstance(error, CollectiveMismatch) or held is None:
        return error
    held.mistake = error
    return None


def _forget_all() -> None:
    """In a forked child: what it sent would count as its parent's."""
    for held in _groups:
        if (group := held()) is not None:
            group.lose(ConfigError("a forked child cannot use the groups of its parent", hint="use them in the rank"))


os.register_at_fork(after_in_child=_forget_all)
