"""Decide how calls are settled: the two ends of a link as state machines.

Pure: `peer.py` and `server.py` own the sockets and the clock. The tests run the same decisions on a simulated machine.

C1  Every call that was begun is settled exactly once.
C2  Once a newer generation has answered, answers of older generations settle nothing.
C3  A generation runs a call at most once, and runs the calls of one caller in their order.
C4  A call that is cancelled or past its deadline before its turn is not run.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from argosy.fabric.frames import CANCELLED, LATE, STALE, Call

IN_FLIGHT_MAX = 4096
"""Unanswered calls that one caller may have at one rank; the next call waits."""
CANCELLED_MAX = 4096

Pending = TypeVar("Pending")


class Alive(msgspec.Struct, frozen=True):
    """The rank lives, or starts soon, in this generation."""

    generation: int


class Gone(msgspec.Struct, frozen=True):
    """The generation has ended; a replacement follows if `replaced`."""

    cause: str
    replaced: bool


Fate = Alive | Gone
AskFate = Callable[[int], Fate]
"""Returns the state of one generation of the rank; -1 asks for the newest."""


class Caller(Generic[Pending]):
    """The calls of this process to one rank, across the rank's generations."""

    def __init__(self) -> None:
        self.generation = -1
        """The generation at the other end of the open link; -1 until its greeting arrives."""
        self._floor = 0
        self._count = 0
        self._open: dict[int, Pending] = {}

    def __len__(self) -> int:
        return len(self._open)

    @property
    def is_full(self) -> bool:
        return len(self._open) >= IN_FLIGHT_MAX

    def begin(self, pending: Pending) -> int:
        """Register a call; returns its number on this link."""
        self._count += 1
        self._open[self._count] = pending
        return self._count

    def greeted(self, generation: int) -> bool:
        """The callee has named its generation; False if a newer one answered before (C2)."""
        if generation < self._floor:
            return False
        self.generation = self._floor = generation
        return True

    def answered(self, generation: int, number: int) -> Pending | None:
        """Return the call that this answers; None if it was settled before (C1) or the generation is old (C2)."""
        return None if generation < self._floor else self._open.pop(number, None)

    def give_up(self, number: int) -> Pending | None:
        """Stop waiting for a call; None if it was settled already."""
        return self._open.pop(number, None)

    def lost(self) -> list[Pending]:
        """The link is gone: return every call that was open on it."""
        self.generation = -1
        lost: list[Pending] = []
        while self._open:  # One by one: another thread may begin a call meanwhile.
            lost.append(self._open.popitem()[1])
        return lost

    def over(self, generation: int) -> None:
        """A generation has ended: ignore its later answers (C2)."""
        self._floor = max(self._floor, generation + 1)


class Callee:
    """The calls of one caller, as the rank that runs them sees them."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self._last = 0
        self._cancelled: dict[int, None] = {}

    def arrived(self, call: Call) -> bool:
        """A call has been received; False if it is a repetition (C3)."""
        if call.id <= self._last:
            return False
        self._last = call.id
        return True

    def admit(self, call: Call, now: float) -> int | None:
        """Decide at a call's turn: None to run it, or the kind of the reply that refuses it (C4)."""
        if call.generation not in (-1, self.generation):
            return STALE
        if call.id in self._cancelled:
            del self._cancelled[call.id]
            return CANCELLED
        if call.deadline and call.deadline <= now:
            return LATE
        return None

    def cancel(self, number: int) -> None:
        """Refuse this call at its turn."""
        self._cancelled[number] = None
        while len(self._cancelled) > CANCELLED_MAX:
            del self._cancelled[next(iter(self._cancelled))]
