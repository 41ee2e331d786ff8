"""What one generation of a group works with, made anew whenever the group is re-formed."""

# pyright: reportPrivateImportUsage=false

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from argosy.collective.engine import Engine
from argosy.collective.plans import Ballot, Plan
from argosy.collective.postman import Postman
from argosy.collective.rendezvous import Meeting, meet
from argosy.core import DeadlinePassed, PeerLost


class Inside:
    """Our engine where the ranks share a host, Gloo for the rest."""

    def __init__(self, store: Any, meeting: Meeting, timeout: timedelta) -> None:
        self._store, self._meeting, self._timeout = store, meeting, timeout
        self.engine: Engine | None = None
        self._postman: Postman | None = None
        self._gloo: Any = None
        self._ballot: Ballot | None = None
        self._lock = threading.Lock()

    def open(self, ranks: Sequence[int], timeout_s: float, give_up: Callable[[], bool] | None) -> None:
        hellos, segment = meet(self._store, self._meeting, timeout_s, give_up)
        if segment is not None:
            self.engine = Engine(segment, hellos, ranks)

    def takes(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether our engine serves such tensors."""
        if self.engine is None:
            return False
        for tensor in tensors:  # noqa: SIM110 (half the time of a generator, in every operation)
            if not tensor.is_cpu or tensor.layout is not torch.strided:
                return False
        return True

    def ballot(self, words: Sequence[int]) -> Ballot:
        """These words, ready for a vote."""
        if self._ballot is None or len(self._ballot.words) != len(words):
            self._ballot = Ballot(len(words))
        self._ballot.words[:] = words
        return self._ballot

    def postman(self) -> Postman:
        with self._lock:
            assert self.engine is not None
            if self._postman is None:
                self._postman = Postman(self.engine)
            return self._postman

    def gloo(self) -> Any:
        """Torch's Gloo group of this generation, made by all ranks when first needed."""
        with self._lock:
            if self._gloo is None:
                meeting = self._meeting
                store = dist.PrefixStore(f"argosy/gloo/{meeting.generation}", self._store)
                self._gloo = dist.ProcessGroupGloo(store, meeting.rank, meeting.size, timeout=self._timeout)
            return self._gloo

    def through_gloo(self, plan: Plan) -> None:
        method, arguments = plan.gloo
        try:
            getattr(self.gloo(), method)(*arguments).wait()
        except RuntimeError as error:
            text = str(error)
            if any(sign in text for sign in ("onnection", "ocket", "eer")):
                raise PeerLost("a peer", text) from error
            if "imed out" in text:
                raise DeadlinePassed(f"{plan.name}: {text}", self._timeout.total_seconds()) from error
            raise

    def close(self) -> None:
        if self._postman is not None:
            self._postman.close()
        if self.engine is not None:
            self.engine.close()
        self._gloo = None
