"""What happens to a mesh, as its owner hears it: an iterator, and callbacks."""

import contextlib
import sys
import threading
import traceback
from collections.abc import Callable, Iterator

import msgspec

from argosy.control import facts
from argosy.core import DeadlinePassed, PeerLost


class MeshEvent(msgspec.Struct, frozen=True):
    """One thing that happened: `what` is started, lost, replaced, paused, resumed, hung, gave up or ended."""

    what: str
    rank: int = -1
    generation: int = 0
    cause: str = ""
    at: float = 0.0

    def __str__(self) -> str:
        who = "mesh" if self.rank < 0 else f"rank {self.rank}"
        generation = f", generation {self.generation}" if self.what in ("started", "replaced") else ""
        return f"{who} {self.what}{generation}{f': {self.cause}' if self.cause else ''}"


def event_of(fact: facts.AnyFact) -> MeshEvent | None:
    """The event that a fact is for the mesh's owner, if it is one."""
    match fact:
        case facts.RankStarted(at=at, rank=rank):
            return MeshEvent("replaced" if rank.generation else "started", rank.index, rank.generation, "", at)
        case facts.RankExited(at=at, rank=rank, asked=False, status=status, oom=oom):
            return MeshEvent("lost", rank.index, rank.generation, oom or str(status), at)
        case facts.RankPaused(at=at, rank=rank, resumed=resumed):
            return MeshEvent("resumed" if resumed else "paused", rank.index, rank.generation, "", at)
        case facts.HangSeen(at=at, summary=summary):
            return MeshEvent("hung", cause=summary, at=at)
        case facts.GaveUp(at=at, reason=reason):
            return MeshEvent("gave up", cause=reason, at=at)
        case facts.LaunchEnded(at=at, reason=reason):
            return MeshEvent("ended", cause=reason, at=at)
        case _:
            return None


class Events:
    """All that happened so far; iterating waits for more until the mesh has ended."""

    KEPT_MAX = 100_000

    def __init__(self) -> None:
        self._events: list[MeshEvent] = []
        self._news = threading.Condition()
        self._heard: list[Callable[[MeshEvent], object]] = []

    def add(self, event: MeshEvent) -> None:
        """Tell everybody. A callback that raises hurts nobody but itself."""
        with self._news:
            if len(self._events) < self.KEPT_MAX:
                self._events.append(event)
            self._news.notify_all()
            heard = list(self._heard)
        for callback in heard:
            try:
                callback(event)
            except Exception:
                with contextlib.suppress(Exception):
                    traceback.print_exc(file=sys.stderr)

    def subscribe(self, callback: Callable[[MeshEvent], object]) -> None:
        """Call `callback` with every event from now on, on a thread of Argosy's."""
        with self._news:
            self._heard.append(callback)

    def last(self) -> MeshEvent | None:
        """The newest event."""
        with self._news:
            return self._events[-1] if self._events else None

    def newest(self, rank: int) -> int:
        """The newest generation of a rank that was started."""
        with self._news:
            return max((e.generation for e in self._events if e.rank == rank), default=0)

    def wait(self, what: str, rank: int | None = None, timeout_s: float = 60.0) -> MeshEvent:
        """The first event of this kind, as soon as there is one.

        Raises:
            DeadlinePassed: there was none within `timeout_s`.
            PeerLost: the mesh ended without it.
        """

        def find() -> MeshEvent | None:
            asked = (e for e in self._events if e.what == what and rank in (None, e.rank))
            return next(asked, next((e for e in self._events if e.what == "ended"), None))

        with self._news:
            found = self._news.wait_for(find, timeout_s)
        if found is None:
            raise DeadlinePassed(f"an event {what!r}", timeout_s)
        if found.what != what:
            raise PeerLost("the mesh", f"it ended before an event {what!r}: {found.cause}")
        return found

    def __iter__(self) -> Iterator[MeshEvent]:
        position = 0
        while True:
            with self._news:
                while len(self._events) <= position:
                    self._news.wait(1.0)
                event = self._events[position]
            position += 1
            yield event
            if event.what == "ended":
                return
