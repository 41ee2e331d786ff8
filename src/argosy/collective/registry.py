"""The groups of this process in the order of their creation, the latch that covers them, and the joining state."""
# pyright: reportPrivateImportUsage=false

import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from argosy.collective.request import CollectiveMismatch
from argosy.core import ConfigError, PeerLost

if TYPE_CHECKING:
    from argosy.collective.group import Group
    from argosy.collective.latch import Latch

_groups: "list[weakref.ref[Group]]" = []
_made: Counter[tuple[int, ...]] = Counter()
_lock = threading.Lock()


class _State:
    """What covers all groups of the process."""

    latch: "Latch | None" = None
    joining = False
    """Whether new groups begin in the state "joining"."""
    meet: Callable[[], None] | None = None
    """Forms the groups that are joining, when one of them is first used; None: they answer locally."""


state = _State()


def add(group: "Group") -> None:
    with _lock:
        _groups.append(weakref.ref(group))


def own_store(store: Any, ranks: Sequence[int]) -> Any:
    """Return the part of the store in which a new group of these ranks meets.

    Each group gets its own part, because a destroyed group of the same ranks has left its keys. All ranks of a group
    create their groups in the same order.
    """
    with _lock:
        _made[tuple(ranks)] += 1
        return dist.PrefixStore(f"argosy/{_made[tuple(ranks)]}", store)


def raise_known_loss(ranks: Sequence[int]) -> bool:
    """Raise the loss of one of these global ranks, if a group of this process knows of one; otherwise return False."""
    names = {f"rank {rank}" for rank in ranks}
    for group in groups():
        group.check_loss()
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


def defer_mismatch(error: BaseException) -> BaseException | None:
    """Give a mismatch to the latch, whose vote raises it, and return None: DDP's reducer must not see an exception.

    Other errors, and those outside a latch, are returned.
    """
    if not isinstance(error, CollectiveMismatch) or state.latch is None:
        return error
    state.latch.mismatch = error
    return None


def _forget_all() -> None:
    """In a forked child: its operations would count as its parent's."""
    for held in _groups:
        if (group := held()) is not None:
            group.lose(
                ConfigError("a forked child cannot use the groups of its parent", hint="use them in the rank itself")
            )


os.register_at_fork(after_in_child=_forget_all)
