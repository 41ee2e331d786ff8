"""The argosy groups of this process, in the order in which they were made, and the latch that covers them."""

import threading
import weakref
from typing import TYPE_CHECKING

from argosy.collective.wire import CollectiveMismatch

if TYPE_CHECKING:
    from argosy.collective.group import Group
    from argosy.collective.latch import Latch

_groups: "list[weakref.ref[Group]]" = []
_lock = threading.Lock()
_latch: "Latch | None" = None
_joining = False


def add(group: "Group") -> None:
    with _lock:
        _groups.append(weakref.ref(group))


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
