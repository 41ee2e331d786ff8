"""The shared-memory engine of one group and generation: operations, point to point, and why they broke."""

import threading
import time
import weakref
from collections.abc import Callable, Sequence

import msgspec

from argosy._select import native
from argosy.collective.rendezvous import Hello
from argosy.collective.segment import ABORT_DEADLINE, ABORT_ELSEWHERE, Segment
from argosy.collective.watcher import watcher
from argosy.collective.wire import CollectiveMismatch, Wish, explain
from argosy.core import ArgosyError, DeadlinePassed, PeerLost

Part = tuple[int, int]
_ABORTED, _MISMATCH, _DEADLINE = 1, 2, 3
_open: "weakref.WeakSet[Engine]" = weakref.WeakSet()


class Engine:
    """Moves bytes between the ranks of a group on one host. One operation at a time, in the same order everywhere."""

    def __init__(self, segment: Segment, hellos: Sequence[Hello], ranks: Sequence[int]) -> None:
        self.segment = segment
        self.size, self.rank = segment.shape.size, segment.rank
        self._ranks = tuple(ranks)
        self.on_loss: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._number = 0
        _open.add(self)
        self._tickets = [
            watcher().watch(hello.pid, self._loss_of(rank)) for rank, hello in enumerate(hellos) if rank != self.rank
        ]

    def run(
        self, wish: Wish, sends: Sequence[Part], receives: Sequence[Part], timeout_s: float, site: str = ""
    ) -> None:
        """Take part in one collective, which was called at `site`.

        Raises:
            PeerLost: a rank of the group died before all had arrived.
            DeadlinePassed: some rank did not arrive in time; it is named, and the group is lost.
            CollectiveMismatch: the ranks want different things; the group can go on.
        """
        with self._lock:
            self._number += 1
            head = wish.pack(self._number, site)
            try:
                code = native.run_collective(self.segment.address, self.rank, head, sends, receives, timeout_s)
            except BaseException as error:  # a signal's: the others must not wait for this rank
                self._leave(f"it left {wish.name}: {type(error).__name__}")
                raise
            if code:
                raise self._explain(code, timeout_s)

    def _leave(self, cause: str) -> None:
        """Be the one that is lost; the engine that was interrupted may have said so already, but not why."""
        self.abort(cause, self.rank + 1)
        if self.segment.broken() == (self.rank + 1, ""):
            self.segment.say(cause)

    def check(self) -> None:
        """Raise what an operation would, if the group is already broken."""
        if self.segment.broken() is not None:
            raise self._explain(_ABORTED, 0.0)

    def abort(self, cause: str, code: int = ABORT_ELSEWHERE) -> None:
        """Break the waits of all ranks because of something outside this group."""
        self.segment.abort(code, cause)

    def close(self) -> None:
        """Watch the peers no more. The memory goes when the last operation lets go of it."""
        for ticket in self._tickets:
            watcher().forget(ticket)
        self._tickets = []
        _open.discard(self)

    def _loss_of(self, rank: int) -> Callable[[str], None]:
        def told(cause: str) -> None:
            self.segment.abort(rank + 1, cause)
            self.on_loss()

        return told

    def late(self, what: str, timeout_s: float) -> DeadlinePassed:
        return DeadlinePassed(
            what, timeout_s, hint="look at that rank (`argosy why`), or give the group a longer timeout"
        )

    def abort_late(self, error: DeadlinePassed) -> None:
        """Tell the others that this rank's patience has ended, and what it waited for."""
        self.segment.abort(ABORT_DEADLINE, f"{error.seconds:g} {error.what}")

    def name_of(self, rank: int) -> str:
        """As people count ranks: in the whole world."""
        return f"rank {self._ranks[rank]}"

    def last_of(self, rank: int) -> str:
        """Name a rank, with what it did last."""
        last = self._wish(rank)[0]
        elsewhere = self._elsewhere(self._ranks[rank])
        return f"{self.name_of(rank)} ({f'last in {last}' if last.number else 'has issued none yet'}{elsewhere})"

    def _elsewhere(self, rank: int) -> str:
        """In what a rank of the world has arrived, in another group, where this one has not."""
        for other in list(_open):
            if other is not self and rank in other._ranks:
                index = other._ranks.index(rank)
                ahead = other.segment.stage(index) - other.segment.stage(other.rank)
                if 0 < ahead % (1 << 32) < 1 << 31:
                    return f", and is in {other._wish(index)[0]} of another group"
        return ""

    def _wish(self, rank: int, stage: int | None = None) -> tuple[Wish, tuple[int, ...]]:
        """What a rank asked for; its root too is named by the rank in the world."""
        wish, sizes = self.segment.wish(rank, stage)
        return (wish if wish.root < 0 else msgspec.structs.replace(wish, root=self._ranks[wish.root])), sizes

    def _behind(self) -> str:
        """Who has arrived less often than this rank."""
        mine = self.segment.stage(self.rank)
        behind = [r for r in range(self.size) if 0 < (mine - self.segment.stage(r)) % (1 << 32) < 1 << 31]
        return ", ".join(map(self.last_of, behind)) or "nobody"

    def _explain(self, code: int, timeout_s: float) -> ArgosyError:
        wish = self._wish(self.rank)[0]
        if code == _MISMATCH:
            # Nobody overwrites the heads of this stage before this rank has arrived once more.
            stage = (self.segment.stage(self.rank) - 1) % (1 << 32)
            found = [self._wish(rank, stage) for rank in range(self.size)]
            return CollectiveMismatch(
                explain(dict(zip(self._ranks, found, strict=True))),
                hint="let all ranks of the group call the same operations in the same order; it can be used on",
            )
        if code == _DEADLINE:
            error = self.late(f"{wish}: waited for {self._behind()}", timeout_s)
            self.segment.say(f"{timeout_s:g} {error.what}")  # the operation itself has aborted
            return error
        reason, cause = self.segment.broken() or (ABORT_ELSEWHERE, "")
        # The cause is written after the word, by another process: give it a moment.
        for _ in range(10):
            if cause:
                break
            time.sleep(0.001)
            reason, cause = self.segment.broken() or (reason, cause)
        if reason == ABORT_DEADLINE:
            seconds, _, what = cause.partition(" ")
            return self.late(what or "a collective", float(seconds or timeout_s))
        if reason == ABORT_ELSEWHERE:
            return PeerLost("a rank of another group", cause)
        hint = "its own output may say why; re-form the group with its replacement, or end"
        return PeerLost(self.name_of(reason - 1), cause or "its process is gone", hint=hint)
