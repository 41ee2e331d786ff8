"""The transport of one generation of a group: the shared-memory engine on one host, Gloo for the rest.

Re-forming a group replaces its transport.

I1  No wait outlives a loss: Gloo is watched from outside, because it would wait on for the living ranks.
I2  Gloo works on copies: an operation that was abandoned may still write, but not into the caller's tensors.
"""

# pyright: reportPrivateImportUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from argosy.collective._torch import tree_map
from argosy.collective.engine import Engine
from argosy.collective.p2p import PointToPoint
from argosy.collective.peer_links import Links
from argosy.collective.plans import Ballot, OperationPlan
from argosy.collective.rendezvous import Meeting, meet
from argosy.collective.segment import GroupSegment
from argosy.core import DeadlinePassed, PeerLost

_POLL_S = 0.02
_GRACE_S = 1.0
"""How long to wait for the watcher, which names the lost rank: Gloo's own error often comes first, without a name."""


class Transport:
    """The engine if all ranks share a host, and Gloo for what it does not serve."""

    monitor: Engine | Links
    """Reports that a rank is lost."""

    def __init__(self, store: Any, meeting: Meeting, timeout: timedelta) -> None:
        self._store, self._meeting, self._timeout = store, meeting, timeout
        self.engine: Engine | None = None
        self._p2p: PointToPoint | None = None
        self._gloo: Any = None
        self._abandoned = False
        self._ballot: Ballot | None = None
        self._lock = threading.Lock()

    def open(self, ranks: Sequence[int], timeout_s: float, give_up: Callable[[], bool] | None) -> None:
        members, found = meet(self._store, self._meeting, timeout_s, give_up)
        rank = self._meeting.rank
        if isinstance(found, GroupSegment):
            self.monitor = self.engine = Engine(found, members, ranks)
            return
        near = {r: member.pid for r, member in enumerate(members) if r != rank and member.host == members[rank].host}
        self.monitor = Links(found, near, ranks)

    def takes(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the engine serves these tensors."""
        if self.engine is None:
            return False
        for tensor in tensors:  # noqa: SIM110 (half the time of a generator, in every operation)
            if not tensor.is_cpu or tensor.layout is not torch.strided:
                return False
        return True

    def agree(self, words: Sequence[int], timeout_s: float) -> list[int]:
        """Return the minimum of each word over all ranks."""
        if self._ballot is None or len(self._ballot.words) != len(words):
            self._ballot = Ballot(len(words))
        ballot = self._ballot
        ballot.words[:] = words
        if self.engine is None:
            self.through_gloo(ballot.plan(), timeout_s)
        else:
            self.engine.run(ballot.request, [ballot.part], [ballot.part], timeout_s)
        return ballot.words.tolist()

    def carry_out(self, plan: OperationPlan, timeout_s: float, site: str) -> int:
        """Carry a plan out; returns the sender if Gloo received from any rank, else -1."""
        if not self.takes(plan.tensors):
            return self.through_gloo(plan, timeout_s)
        assert self.engine is not None
        for call in plan.prepare():
            self.engine.run(call.request, call.sends, call.receives, timeout_s, site)
            call.memory.write_back()
        plan.after()
        return -1

    def p2p(self) -> PointToPoint:
        with self._lock:
            assert self.engine is not None
            if self._p2p is None:
                self._p2p = PointToPoint(self.engine)
            return self._p2p

    def through_gloo(self, plan: OperationPlan, timeout_s: float) -> int:
        """Carry a plan out by Gloo; returns the sender if it received from any rank, else -1.

        Raises:
            PeerLost, DeadlinePassed: as the engine raises them.
        """
        method, arguments = plan.gloo
        copies: dict[int, torch.Tensor] = {}
        given = tree_map(partial(_copied, copies), arguments)
        deadline = time.monotonic() + timeout_s
        try:
            with self._lock:
                if self._gloo is None:
                    self._gloo = self._watched(self._make_gloo, plan, deadline)
            work = getattr(self._gloo, method)(*given)
            if method.startswith(("send", "recv", "reduce_scatter")):  # Their `is_completed` never turns True.
                self._watched(work.wait, plan, deadline)
            else:
                self._await(work, plan, deadline)
        except (PeerLost, DeadlinePassed) as error:
            self._abandoned = True
            self.monitor.abort(str(error))
            raise
        except RuntimeError as error:
            self._explain(error, plan)
            raise
        with torch.no_grad():
            for tensor in plan.result:
                if id(tensor) in copies:
                    # Writing a sparse tensor replaces its parts, which on a detached one would change nothing here.
                    (tensor.detach() if _is_dense(tensor) else tensor).copy_(copies[id(tensor)])
        return work._source_rank() if method == "recv_anysource" else -1

    def _make_gloo(self) -> Any:
        """Make torch's Gloo group of this generation; all ranks do when they first need it."""
        meeting = self._meeting
        store = dist.PrefixStore(f"argosy/gloo/{meeting.generation}", self._store)
        return dist.ProcessGroupGloo(store, meeting.rank, meeting.size, timeout=self._timeout)

    def _await(self, work: Any, plan: OperationPlan, deadline: float) -> None:
        """Wait by polling: a wait in Gloo cannot be cancelled, and would block the exit of the process."""
        began, looked = time.monotonic(), 0.0
        while not work.is_completed():
            now = time.monotonic()
            if now - looked > _POLL_S:
                looked = now
                self._check(plan, deadline)
            time.sleep(min(_POLL_S, max(0.00005, (now - began) / 20)))
        work.wait()

    def _watched(self, call: Callable[[], Any], plan: OperationPlan, deadline: float) -> Any:
        """Call in a thread, which is abandoned if the group is lost meanwhile."""
        found: list[Any] = []
        failed: list[BaseException] = []
        done = threading.Event()

        def run() -> None:
            try:
                found.append(call())
            except BaseException as error:
                failed.append(error)
            done.set()

        threading.Thread(target=run, name="argosy-gloo", daemon=True).start()
        while not done.wait(_POLL_S):
            self._check(plan, deadline)
        if failed:
            raise failed[0]
        return found[0]

    def _check(self, plan: OperationPlan, deadline: float) -> None:
        self.monitor.check()
        if time.monotonic() > deadline + _GRACE_S:
            raise DeadlinePassed(f"{plan.name} through Gloo", self._timeout.total_seconds())

    def _explain(self, error: RuntimeError, plan: OperationPlan) -> None:
        """Raise PeerLost or DeadlinePassed, if Gloo's error text tells of one."""
        text = str(error)
        if any(sign in text for sign in ("onnection", "ocket", "eer")):
            end = time.monotonic() + _GRACE_S
            while time.monotonic() < end:
                self.monitor.check()
                time.sleep(0.002)
            raise PeerLost("a peer", text) from error
        if "imed out" in text:
            raise DeadlinePassed(f"{plan.name}: {text}", self._timeout.total_seconds()) from error

    def close(self) -> None:
        if self._p2p is not None:
            self._p2p.close()
        if hasattr(self, "monitor"):
            self.monitor.close()
        if self._gloo is not None and self._abandoned:
            # Leak it: its destructor would wait for abandoned operations until their deadline.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._gloo))
        self._gloo = None


def _copied(copies: dict[int, torch.Tensor], value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if id(value) not in copies:
        plain = value.detach()
        flat = {"memory_format": torch.contiguous_format} if _is_dense(value) else {}
        copies[id(value)] = plain.clone(**flat)
    return copies[id(value)]


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided
