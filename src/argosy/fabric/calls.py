"""Decide what becomes of calls: the two ends of a link as state machines, without sockets and clocks.

The shells in `peer.py` and `server.py` perform what is decided here; a simulated machine runs the same decisions.

C1  Every call that was begun is settled exactly once.
C2  What a generation says that is older than one already heard of settles nothing.
C3  A call is run at most once by a generation, in the order in which its caller made them.
C4  A call that was cancelled, or whose deadline has passed, before its turn is not run.
"""

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import msgspec

from argosy.fabric.frames import CANCELLED, LATE, STALE, Call

IN_FLIGHT_MAX = 4096
"""Calls of one caller to one rank that may be unanswered; the next one waits."""
CANCELLED_MAX = 4096

Ticket = TypeVar("Ticket")


class Alive(msgspec.Struct, frozen=True):
    """As far as is known, the rank lives or will soon, in this generation."""

    generation: int


class Gone(msgspec.Struct, frozen=True):
    """A generation has ended; another one comes if `replaced`."""

    cause: str
    replaced: bool


Fate = Alive | Gone
Oracle = Callable[[int], Fate]
"""What became of a generation of the rank; -1 asks for the newest."""


class Caller(Generic[Ticket]):
    """What a process knows of its calls to one rank, through the rank's generations."""

    def __init__(self) -> None:
        self.generation = -1
        """Of the link that is open now, -1 until it has said."""
        self._floor = 0
        self._count = 0
        self._open: dict[int, tuple[Ticket, float]] = {}

    def __len__(self) -> int:
        return len(self._open)

    @property
    def is_full(self) -> bool:
        return len(self._open) >= IN_FLIGHT_MAX

    def begin(self, ticket: Ticket, deadline: float = 0.0) -> int:
        """Count a call; returns its number on this link."""
        self._count += 1
        self._open[self._count] = (ticket, deadline)
        return self._count

    def greeted(self, generation: int) -> bool:
        """The link says whom it leads to; False if that is an older generation than one heard of (C2)."""
        if generation < self._floor:
            return False
        self.generation = self._floor = generation
        return True

    def answered(self, generation: int, number: int) -> Ticket | None:
        """Whose answer this is; None if nobody waits for it (C1) or an old generation sent it (C2)."""
        if generation < self._floor:
            return None
        found = self._open.pop(number, None)
        return None if found is None else found[0]

    def give_up(self, number: int) -> Ticket | None:
        """Nobody waits for this call any more; None if it was settled already."""
        found = self._open.pop(number, None)
        return None if found is None else found[0]

    def lost(self) -> list[Ticket]:
        """The link is gone, and with it every call on it."""
        self.generation = -1
        lost: list[Ticket] = []
        while self._open:  # One by one: another thread may begin a call meanwhile.
            lost.append(self._open.popitem()[1][0])
        return lost

    def over(self, generation: int) -> None:
        """A generation has ended: it is not heard again (C2)."""
        self._floor = max(self._floor, generation + 1)

    def overdue(self, now: float) -> Iterator[int]:
        """The calls whose deadline has passed."""
        return (number for number, (_, deadline) in list(self._open.items()) if deadline and deadline <= now)


class Callee:
    """What a rank knows of one caller's calls."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self._last = 0
        self._cancelled: dict[int, None] = {}

    def arrived(self, call: Call) -> bool:
        """A call came off the link; False if it came before (C3)."""
        if call.id <= self._last:
            return False
        self._last = call.id
        return True

    def admit(self, call: Call, now: float) -> int | None:
        """The turn of a call has come: None to run it, or the kind of the reply that refuses it (C4)."""
        if call.generation not in (-1, self.generation):
            return STALE
        if call.id in self._cancelled:
            del self._cancelled[call.id]
            return CANCELLED
        if call.deadline and call.deadline <= now:
            return LATE
        return None

    def cancel(self, number: int) -> None:
        """Refuse a call when its turn comes."""
        self._cancelled[number] = None
        while len(self._cancelled) > CANCELLED_MAX:
            del self._cancelled[next(iter(self._cancelled))]
