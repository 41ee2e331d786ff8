"""The transport of one generation of a group: it chooses the engine of an operation by its tensors' devices.

Re-forming a group replaces its transport.
"""

# pyright: reportPrivateImportUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from argosy.collective.engine import Engine
from argosy.collective.gloo import Gloo
from argosy.collective.p2p import PointToPoint
from argosy.collective.peer_links import Links
from argosy.collective.plans import Ballot
from argosy.collective.reconfigured import Backends, Reconfigured
from argosy.collective.rendezvous import Meeting, meet
from argosy.collective.segment import GroupSegment
from argosy.collective.shared_memory import SharedMemory
from argosy.collective.torch_work import Watch
from argosy.core import ArgosyError


class Transport:
    """Shared memory if all ranks share a host, else Gloo; torch's own backend on accelerators that have one.

    Tensors on other accelerators go through the memory of the CPU.
    """

    watch: Watch
    """Reports that a rank is lost."""

    def __init__(self, store: Any, meeting: Meeting, timeout: timedelta, backends: Backends) -> None:
        self._store, self._meeting, self._timeout, self._backends = store, meeting, timeout, backends
        self.shared: SharedMemory | None = None
        self.on_loss: Callable[[], None] = lambda: None
        self._p2p: PointToPoint | None = None
        self._gloo: Gloo | None = None
        self._on_device: dict[str, Reconfigured] = {}
        self._ballot: Ballot | None = None
        self._lock = threading.Lock()

    def open(self, ranks: Sequence[int], timeout_s: float, give_up: Callable[[], bool] | None) -> None:
        members, found = meet(self._store, self._meeting, timeout_s, give_up)
        rank = self._meeting.rank
        if isinstance(found, GroupSegment):
            self.watch = self.shared = SharedMemory(found, members, ranks)
        else:
            own = members[rank].host
            near = {r: member.pid for r, member in enumerate(members) if r != rank and member.host == own}
            self.watch = Links(found, near, ranks)
        self._gloo = Gloo(self.watch, self._store, self._meeting, self._timeout)
        self.watch.on_loss = self._lost

    def engine_for(self, tensors: Sequence[torch.Tensor]) -> Engine:
        """The engine that serves these tensors."""
        for tensor in tensors:
            if not tensor.is_cpu and self._backends.serve(tensor.device.type):
                return self._device_engine(tensor.device.type)
            if tensor.layout is not torch.strided:
                assert self._gloo is not None
                return self._gloo
        engine = self.shared or self._gloo
        assert engine is not None
        return engine

    def _device_engine(self, kind: str) -> Reconfigured:
        with self._lock:
            if kind not in self._on_device:
                backend = self._backends.of(kind, self._store, self._meeting, self._timeout)
                timeout_s = self._timeout.total_seconds()
                self._on_device[kind] = Reconfigured(self.watch, backend, self._store, self._meeting, timeout_s)
            return self._on_device[kind]

    def agree(self, words: Sequence[int], timeout_s: float) -> list[int]:
        """Return the minimum of each word over all ranks."""
        if self._ballot is None or self._ballot.count != len(words):
            self._ballot = Ballot(len(words))
        ballot = self._ballot
        ballot.put(words)
        if self.shared is not None:
            self.shared.exchange(ballot.request, [ballot.part], [ballot.part], timeout_s)
        else:
            assert self._gloo is not None
            self._gloo.run(ballot.plan(), timeout_s)
        return ballot.minima()

    def p2p(self) -> PointToPoint:
        with self._lock:
            assert self.shared is not None
            if self._p2p is None:
                self._p2p = PointToPoint(self.shared)
            return self._p2p

    def loss(self) -> ArgosyError | None:
        """The loss, if there is one; without its traceback, which would hold this transport's memory."""
        try:
            self.watch.check()
        except ArgosyError as loss:
            return loss.with_traceback(None)
        return None

    def abort(self, cause: str) -> None:
        """End the waits of all ranks."""
        self.watch.abort(cause)
        self._revoke()

    def _lost(self) -> None:
        self._revoke()
        self.on_loss()

    def _revoke(self) -> None:
        for engine in list(self._on_device.values()):
            engine.revoke()

    def close(self) -> None:
        if self._p2p is not None:
            self._p2p.close()
        if self._gloo is not None:
            self.watch.on_loss = lambda: None  # Else the two hold each other, and their memory, until a collection.
            self._gloo.close()
