"""What one generation of a group works with, made anew whenever the group is re-formed.

I1  No wait outlives a loss: what Gloo does is watched from outside, for Gloo itself waits on for those who are alive.
I2  Gloo moves copies: an operation that was left behind may still write, and must not write into the caller's tensors.
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
from torch.utils._pytree import tree_map

from argosy.collective.engine import Engine
from argosy.collective.links import Links
from argosy.collective.plans import Ballot, Plan
from argosy.collective.postman import Postman
from argosy.collective.rendezvous import Meeting, meet
from argosy.collective.segment import Segment
from argosy.core import DeadlinePassed, PeerLost

_POLL_S = 0.02
_GRACE_S = 1.0
"""Gloo's own error is often sooner than the watcher's word, and does not name the rank."""


class Inside:
    """Our engine where the ranks share a host, Gloo for the rest. Its ward knows of losses."""

    ward: Engine | Links

    def __init__(self, store: Any, meeting: Meeting, timeout: timedelta) -> None:
        self._store, self._meeting, self._timeout = store, meeting, timeout
        self.engine: Engine | None = None
        self._postman: Postman | None = None
        self._gloo: Any = None
        self._left_behind = False
        self._ballot: Ballot | None = None
        self._lock = threading.Lock()

    def open(self, ranks: Sequence[int], timeout_s: float, give_up: Callable[[], bool] | None) -> None:
        hellos, found = meet(self._store, self._meeting, timeout_s, give_up)
        rank = self._meeting.rank
        if isinstance(found, Segment):
            self.ward = self.engine = Engine(found, hellos, ranks)
            return
        near = {r: hello.pid for r, hello in enumerate(hellos) if r != rank and hello.host == hellos[rank].host}
        self.ward = Links(found, near, ranks)

    def takes(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether our engine serves such tensors."""
        if self.engine is None:
            return False
        for tensor in tensors:  # noqa: SIM110 (half the time of a generator, in every operation)
            if not tensor.is_cpu or tensor.layout is not torch.strided:
                return False
        return True

    def agree(self, words: Sequence[int], timeout_s: float) -> list[int]:
        """The smallest of each word over all ranks."""
        if self._ballot is None or len(self._ballot.words) != len(words):
            self._ballot = Ballot(len(words))
        ballot = self._ballot
        ballot.words[:] = words
        if self.engine is None:
            self.through_gloo(ballot.plan(), timeout_s)
        else:
            self.engine.run(ballot.wish, [ballot.part], [ballot.part], timeout_s)
        return ballot.words.tolist()

    def carry_out(self, plan: Plan, timeout_s: float, site: str) -> int:
        """Returns who sent, where Gloo was asked to receive from anybody; else -1."""
        if not self.takes(plan.tensors):
            return self.through_gloo(plan, timeout_s)
        assert self.engine is not None
        for step in plan.prepare():
            self.engine.run(step.wish, step.sends, step.receives, timeout_s, site)
            step.finish()
        plan.after()
        return -1

    def postman(self) -> Postman:
        with self._lock:
            assert self.engine is not None
            if self._postman is None:
                self._postman = Postman(self.engine)
            return self._postman

    def through_gloo(self, plan: Plan, timeout_s: float) -> int:
        """Carry a plan out by Gloo; returns from whom it received, if that was the question.

        Raises:
            PeerLost, DeadlinePassed: as our engine says it.
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
            if method in ("send", "recv", "recv_anysource"):
                self._watched(work.wait, plan, deadline)  # these works tell their end to who waits for it alone
            else:
                self._await(work, plan, deadline)
        except (PeerLost, DeadlinePassed) as error:
            self._left_behind = True
            self.ward.abort(str(error))
            raise
        except RuntimeError as error:
            self._explain(error, plan)
            raise
        with torch.no_grad():
            for tensor in plan.result:
                if id(tensor) in copies:
                    # A sparse tensor is written by exchanging its parts: those of a detached one are not its own.
                    (tensor.detach() if _is_dense(tensor) else tensor).copy_(copies[id(tensor)])
        return work._source_rank() if method == "recv_anysource" else -1

    def _make_gloo(self) -> Any:
        """Torch's Gloo group of this generation, made by all ranks when first needed."""
        meeting = self._meeting
        store = dist.PrefixStore(f"argosy/gloo/{meeting.generation}", self._store)
        return dist.ProcessGroupGloo(store, meeting.rank, meeting.size, timeout=self._timeout)

    def _await(self, work: Any, plan: Plan, deadline: float) -> None:
        """Poll: Gloo cannot be told to stop waiting, and a thread that waits in it could not be left at exit."""
        began, looked = time.monotonic(), 0.0
        while not work.is_completed():
            now = time.monotonic()
            if now - looked > _POLL_S:
                looked = now
                self._look(plan, deadline)
            time.sleep(min(_POLL_S, max(0.00005, (now - began) / 20)))
        work.wait()

    def _watched(self, call: Callable[[], Any], plan: Plan, deadline: float) -> Any:
        """Call in a thread that is left behind if the group is lost meanwhile."""
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
            self._look(plan, deadline)
        if failed:
            raise failed[0]
        return found[0]

    def _look(self, plan: Plan, deadline: float) -> None:
        self.ward.check()
        if time.monotonic() > deadline + _GRACE_S:
            raise DeadlinePassed(f"{plan.name} through Gloo", self._timeout.total_seconds())

    def _explain(self, error: RuntimeError, plan: Plan) -> None:
        """Raise what Gloo's words mean, if they tell of a loss or a deadline."""
        text = str(error)
        if any(sign in text for sign in ("onnection", "ocket", "eer")):
            end = time.monotonic() + _GRACE_S
            while time.monotonic() < end:
                self.ward.check()
                time.sleep(0.002)
            raise PeerLost("a peer", text) from error
        if "imed out" in text:
            raise DeadlinePassed(f"{plan.name}: {text}", self._timeout.total_seconds()) from error

    def close(self) -> None:
        if self._postman is not None:
            self._postman.close()
        if hasattr(self, "ward"):
            self.ward.close()
        if self._gloo is not None and self._left_behind:
            # Its destructor would wait for operations that were left behind, until their deadline.
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
