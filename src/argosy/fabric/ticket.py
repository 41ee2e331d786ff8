"""What a thread waits for, and what it does for others meanwhile."""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from argosy.core import ArgosyError
from argosy.fabric.frames import Frame

if TYPE_CHECKING:
    from argosy.fabric.peer import Peer


class Ticket:
    """One call in flight, and later its outcome."""

    __slots__ = ("done", "error", "frame", "late", "number", "on_done", "peer")

    def __init__(self, peer: "Peer") -> None:
        self.peer = peer
        self.number = 0
        self.late = False
        """It waits to be made: see `late.py`."""
        self.done = False
        self.frame: Frame | None = None
        self.error: ArgosyError | None = None
        self.on_done: Callable[[], None] | None = None

    def settle(self, frame: Frame | None, error: ArgosyError | None) -> None:
        self.frame, self.error = frame, error
        self.done = True
        if (told := self.on_done) is not None:
            told()


class Host(Protocol):
    """A rank that runs an endpoint on this thread, and can serve others while that one waits."""

    def serve_while_waiting(self, fd: int, events: int, timeout_s: float, ticket: "Ticket | None") -> bool: ...


class Doing(NamedTuple):
    """The call that a thread runs: its chain and its deadline, and who serves others while it waits."""

    chain: int = 0
    deadline: float = 0.0
    host: Host | None = None


class _Context(threading.local):
    """What this thread does for others. One value: each look at a thread's own costs as much as a call."""

    doing: Doing = Doing()


context = _Context()
