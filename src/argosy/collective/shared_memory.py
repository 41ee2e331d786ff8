"""The engine for ranks that share a host: moves bytes through one segment, and explains why an operation failed."""

import threading
import time
import weakref
from collections.abc import Callable, Sequence

import msgspec

from argosy._exchange import Part
from argosy._select import native
from argosy.collective.peer_watcher import watcher
from argosy.collective.plans import OperationPlan
from argosy.collective.rendezvous import MemberInfo
from argosy.collective.request import CollectiveMismatch, Request, explain_mismatch
from argosy.collective.segment import ABORT_DEADLINE, ABORT_ELSEWHERE, GroupSegment
from argosy.core import ArgosyError, DeadlinePassed, PeerLost

_ABORTED, _MISMATCH, _DEADLINE = 1, 2, 3
_open: "weakref.WeakSet[SharedMemory]" = weakref.WeakSet()


class SharedMemory:
    """Moves bytes between the ranks of a group on one host. One operation at a time, in the same order everywhere."""

    def __init__(self, segment: GroupSegment, members: Sequence[MemberInfo], ranks: Sequence[int]) -> None:
        self.segment = segment
        self.size, self.rank = segment.shape.size, segment.rank
        self._ranks = tuple(ranks)
        self.on_loss: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._number = 0
        _open.add(self)
        self._watches = [
            watcher().watch(member.pid, self._loss_of(rank)) for rank, member in enumerate(members) if rank != self.rank
        ]

    def run(self, plan: OperationPlan, timeout_s: float, site: str = "") -> int:
        for call in plan.prepare():
            self.exchange(call.request, call.sends, call.receives, timeout_s, site)
            call.memory.write_back()
        plan.after()
        return -1

    def exchange(
        self, request: Request, sends: Sequence[Part], receives: Sequence[Part], timeout_s: float, site: str = ""
    ) -> None:
        """Take part in one collective, which was called at `site`.

        Raises:
            PeerLost: a rank of the group died before all had arrived.
            DeadlinePassed: some rank did not arrive in time; it is named, and the group is lost.
            CollectiveMismatch: the ranks called different operations; the group stays usable.
        """
        with self._lock:
            self._number += 1
            head = request.pack(self._number, site)
            try:
                code = native.run_collective(self.segment.address, self.rank, head, sends, receives, timeout_s)
            except BaseException as error:  # From a signal handler: the others must not wait for this rank.
                self._leave(f"it left {request.name}: {type(error).__name__}")
                raise
            if code:
                raise self._explain(code, timeout_s)

    def _leave(self, cause: str) -> None:
        """Abort as the lost rank; the interrupted engine may have aborted already, but without a cause."""
        self.abort(cause, self.rank + 1)
        if self.segment.abort_reason() == (self.rank + 1, ""):
            self.segment.set_cause(cause)

    def check(self) -> None:
        """Raise what an operation would raise, if the group is aborted."""
        if self.segment.abort_reason() is not None:
            raise self._explain(_ABORTED, 0.0)

    def abort(self, cause: str, code: int = ABORT_ELSEWHERE) -> None:
        """End the waits of all ranks, because of something outside this group."""
        self.segment.abort(code, cause)

    def close(self) -> None:
        """Stop watching the peers. The memory is freed with its last user."""
        for watch in self._watches:
            watcher().forget(watch)
        self._watches = []
        _open.discard(self)

    def _loss_of(self, rank: int) -> Callable[[str], None]:
        def on_end(cause: str) -> None:
            self.segment.abort(rank + 1, cause)
            self.on_loss()

        return on_end

    def late(self, what: str, timeout_s: float) -> DeadlinePassed:
        return DeadlinePassed(
            what, timeout_s, hint="look at that rank (`argosy why`), or give the group a longer timeout"
        )

    def abort_late(self, error: DeadlinePassed) -> None:
        """Abort because a deadline passed on this rank, and tell the others what it waited for."""
        self.segment.abort(ABORT_DEADLINE, f"{error.seconds:g} {error.what}")

    def name_of(self, rank: int) -> str:
        """Name a rank by its global number."""
        return f"rank {self._ranks[rank]}"

    def last_of(self, rank: int) -> str:
        """Name a rank and its last operation."""
        last = self._request(rank)[0]
        elsewhere = self._elsewhere(self._ranks[rank])
        return f"{self.name_of(rank)} ({f'last in {last}' if last.number else 'has issued none yet'}{elsewhere})"

    def _elsewhere(self, rank: int) -> str:
        """Name the operation of another group in which a global rank waits for this one."""
        for other in list(_open):
            if other is not self and rank in other._ranks:
                index = other._ranks.index(rank)
                ahead = other.segment.stage(index) - other.segment.stage(other.rank)
                if 0 < ahead % (1 << 32) < 1 << 31:
                    return f", and is in {other._request(index)[0]} of another group"
        return ""

    def _request(self, rank: int, stage: int | None = None) -> tuple[Request, tuple[int, ...]]:
        """Return the request of a rank, with its root as a global rank, and its sizes."""
        request, sizes = self.segment.request(rank, stage)
        if request.root >= 0:
            request = msgspec.structs.replace(request, root=self._ranks[request.root])
        return request, sizes

    def _behind(self) -> str:
        """Name the ranks that have not arrived where this rank has."""
        mine = self.segment.stage(self.rank)
        behind = [r for r in range(self.size) if 0 < (mine - self.segment.stage(r)) % (1 << 32) < 1 << 31]
        return ", ".join(map(self.last_of, behind)) or "nobody"

    def _explain(self, code: int, timeout_s: float) -> ArgosyError:
        request = self._request(self.rank)[0]
        if code == _MISMATCH:
            # The heads of this stage are not overwritten before this rank arrives once more.
            stage = (self.segment.stage(self.rank) - 1) % (1 << 32)
            found = [self._request(rank, stage) for rank in range(self.size)]
            return CollectiveMismatch(
                explain_mismatch(dict(zip(self._ranks, found, strict=True))),
                hint="call the same operations in the same order on all ranks of the group, which stays usable",
            )
        if code == _DEADLINE:
            error = self.late(f"{request}: waited for {self._behind()}", timeout_s)
            self.segment.set_cause(f"{timeout_s:g} {error.what}")  # The operation has aborted the segment.
            return error
        reason, cause = self.segment.abort_reason() or (ABORT_ELSEWHERE, "")
        # Another process writes the cause after the code: give it a moment.
        for _ in range(10):
            if cause:
                break
            time.sleep(0.001)
            reason, cause = self.segment.abort_reason() or (reason, cause)
        if reason == ABORT_DEADLINE:
            seconds, _, what = cause.partition(" ")
            return self.late(what or "a collective", float(seconds or timeout_s))
        if reason == ABORT_ELSEWHERE:
            return PeerLost("a rank of another group", cause)
        hint = "look at its output; re-form the group with its replacement, or end"
        return PeerLost(self.name_of(reason - 1), cause or "its process is gone", hint=hint)
