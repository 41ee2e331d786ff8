"""The calls that this process waits for, and the call that the current thread runs."""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec

from argosy.core import ArgosyError
from argosy.fabric.frames import CallFrame

if TYPE_CHECKING:
    from argosy.fabric.peer import Peer


class PendingCall(msgspec.Struct, eq=False):
    """A call in flight, later its outcome. A struct, because every call makes one."""

    peer: "Peer"
    number: int = 0
    deferred: bool = False
    """It was not sent yet: see `deferred_calls.py`."""
    done: bool = False
    frame: CallFrame | None = None
    error: ArgosyError | None = None
    on_done: Callable[[], None] | None = None

    def settle(self, frame: CallFrame | None, error: ArgosyError | None) -> None:
        self.frame, self.error = frame, error
        self.done = True
        if (on_done := self.on_done) is not None:
            on_done()


class ReentrantServer(Protocol):
    """A server that can run other calls of the same chain while the endpoint on this thread waits."""

    def serve_while_waiting(self, fd: int, events: int, timeout_s: float, pending: "PendingCall | None") -> bool: ...


class CallContext(msgspec.Struct, frozen=True):
    """The call that a thread runs: its chain, its deadline, and the server that it came through."""

    chain: int = 0
    deadline: float = 0.0
    server: ReentrantServer | None = None


class _Context(threading.local):
    """The call of this thread, as one value: each access to a thread's own attributes is slow."""

    call: CallContext = CallContext()


context = _Context()
