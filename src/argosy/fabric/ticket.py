"""What a thread waits for, and what it does for others meanwhile."""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec

from argosy.core import ArgosyError
from argosy.fabric.frames import Frame

if TYPE_CHECKING:
    from argosy.fabric.peer import Peer


class Ticket(msgspec.Struct, eq=False):
    """One call in flight, and later its outcome. A struct: one is made for every call."""

    peer: "Peer"
    number: int = 0
    late: bool = False
    """It waits to be made: see `late.py`."""
    done: bool = False
    frame: Frame | None = None
    error: ArgosyError | None = None
    on_done: Callable[[], None] | None = None

    def settle(self, frame: Frame | None, error: ArgosyError | None) -> None:
        self.frame, self.error = frame, error
        self.done = True
        if (told := self.on_done) is not None:
            told()


class Host(Protocol):
    """A rank that runs an endpoint on this thread, and can serve others while that one waits."""

    def serve_while_waiting(self, fd: int, events: int, timeout_s: float, ticket: "Ticket | None") -> bool: ...


class Doing(msgspec.Struct, frozen=True):
    """The call that a thread runs: its chain and its deadline, and who serves others while it waits."""

    chain: int = 0
    deadline: float = 0.0
    host: Host | None = None


class _Context(threading.local):
    """What this thread does for others. One value: each look at a thread's own costs as much as a call."""

    doing: Doing = Doing()


context = _Context()
