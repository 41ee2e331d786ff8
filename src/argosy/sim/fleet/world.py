"""Virtual time for simulated hosts: a queue of what will happen, one source of chance, and where agents are killed.

Everything follows from the seed. `digest` covers each event that an agent heard, so that two worlds can be compared.
"""

import hashlib
import heapq
import random
from collections.abc import Callable, Container

import msgspec

from argosy.core import ProcessId
from argosy.sim.fleet.faults import Faults, Span

START = 1000.0
Teller = Callable[[str, float, object], None]
"""Is told of each event: who heard it, when, and the event."""


class Violation(AssertionError):
    """An invariant does not hold in a world."""


class AgentKilled(Exception):
    """The simulated agent was killed at this point."""


class World:
    """Time, chance and process ids."""

    def __init__(self, seed: int, faults: Faults, crash_at: Container[int] = ()) -> None:
        self.seed, self.faults = seed, faults
        self.random = random.Random(seed)
        self.now = START
        self.points = 0
        """How many places there were where an agent could have been killed."""
        self.events = 0
        self.done_at: float | None = None
        """When ranks are done that neither end early nor fail; None: after 500 s."""
        self.tell: Teller | None = None
        self._crash_at = crash_at
        self._hash = hashlib.blake2b(digest_size=8)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._queued = 0
        self.processes = 100
        """The highest process id so far."""

    @property
    def can_crash(self) -> bool:
        """Whether an agent may be killed, so that it needs its log."""
        return bool(self._crash_at) or bool(self.faults.per_hour.get("agent")) or self.faults.log_shortened > 0

    @property
    def digest(self) -> str:
        """Names all that happened so far."""
        return self._hash.hexdigest()

    def note(self, who: str, what: object) -> None:
        """Something happened: it becomes part of the digest."""
        self.events += 1
        self._hash.update(msgspec.msgpack.encode((self.now, who, type(what).__name__, what)))
        if self.tell is not None:
            self.tell(who, self.now - START, what)

    def require(self, holds: object, invariant: str, text: str) -> None:
        """Raise `Violation` if an invariant does not hold."""
        if not holds:
            raise Violation(f"seed {self.seed}, at {self.now - START:.3f} s, {invariant}: {text}")

    def point(self) -> None:
        """A place where the agent that is at work may be killed."""
        self.points += 1
        if self.points in self._crash_at:
            raise AgentKilled

    def within(self, span: Span) -> float:
        """A number of seconds between two."""
        return self.random.uniform(*span)

    def happens(self, probability: float) -> bool:
        """Whether something of this probability happens now."""
        return self.random.random() < probability

    def new_process(self) -> ProcessId:
        self.processes += 1
        return ProcessId(self.processes, self.processes)

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something later."""
        self.at(self.now + seconds, action)

    def at(self, at: float, action: Callable[[], None]) -> None:
        """Do something at a time; what is due at the same time happens in the order of asking."""
        self._queued += 1
        heapq.heappush(self._queue, (at, self._queued, action))

    def advance(self) -> bool:
        """Let the next thing happen; False if nothing ever will."""
        if not self._queue:
            return False
        at, _, action = heapq.heappop(self._queue)
        self.now = max(self.now, at)
        action()
        return True
