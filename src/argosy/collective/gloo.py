"""The engine over torch's Gloo: between hosts, for sparse tensors, and on one host if it is asked for.

Gloo cannot be re-formed or aborted: its `abort` does nothing, `get_error` always reports success, its `reconfigure`
meets through the first store, and a rank that is no neighbour of the lost one only times out. So every generation gets
a Gloo group of its own.

I2  Gloo works on copies: an operation that was abandoned may still write, but not into the caller's tensors.
I3  Gloo waits for keys of the store by asking again and again: a wait inside the store would hold its connection, and
    with it all other threads of this rank.
"""

# pyright: reportPrivateImportUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUntypedBaseClass=false

import ctypes
import threading
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from argosy.collective._torch import tree_map
from argosy.collective.plans import OperationPlan
from argosy.collective.rendezvous import Meeting
from argosy.collective.torch_work import Patience, Watch, WatchedEngine
from argosy.core import DeadlinePassed, PeerLost
from argosy.transfer import to_host


class Gloo(WatchedEngine):
    """Torch's Gloo group of one generation, made when it is first needed."""

    def __init__(self, watch: Watch, store: Any, meeting: Meeting, timeout: timedelta) -> None:
        super().__init__(watch)
        self._store, self._meeting, self._timeout = store, meeting, timeout
        self._lock = threading.Lock()
        self._group: Any = None
        self._patient: PatientStore | None = None
        self._abandoned = False

    def run(self, plan: OperationPlan, timeout_s: float, site: str = "") -> int:
        method, arguments = plan.torch_call
        copies: dict[int, torch.Tensor] = {}
        given = tree_map(partial(_copied, copies), arguments)
        patience = Patience(self.watch, f"{plan.name} through Gloo" + (f" at {site}" if site else ""), timeout_s)
        try:
            with self._lock:
                if self._group is None:
                    self._group = self._make(patience)
            work = getattr(self._group, method)(*given)
            if method.startswith(("send", "recv", "reduce_scatter")):  # Their `is_completed` never turns True.
                patience.call(work.wait)
            else:
                patience.poll(work)
        except (PeerLost, DeadlinePassed) as error:
            self._abandoned = True
            self.abort(str(error))
            raise
        except RuntimeError as error:
            self._abandoned = True  # Other operations may still wait.
            patience.explain(error)
        with torch.no_grad():
            for tensor in plan.result:
                if id(tensor) in copies:
                    # Writing a sparse tensor replaces its parts, which on a detached one would change nothing here.
                    (tensor.detach() if _is_dense(tensor) else tensor).copy_(copies[id(tensor)])
        return work._source_rank() if method == "recv_anysource" else -1

    def _make(self, patience: Patience) -> Any:
        """All ranks make the group when they first need it."""
        meeting = self._meeting
        store = self._patient = PatientStore(self._store, f"argosy/gloo/{meeting.generation}/", patience)
        return patience.call(lambda: dist.ProcessGroupGloo(store, meeting.rank, meeting.size, timeout=self._timeout))

    def close(self) -> None:
        super().close()
        if self._group is not None and self._abandoned:
            # Leak it: its destructor would wait for abandoned operations until their deadline.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
        self._group = None


class PatientStore(dist.Store):
    """A part of a store whose waits end with the patience of whoever waits (I3). Keep a reference: torch does not."""

    def __init__(self, store: Any, prefix: str, patience: Patience) -> None:
        super().__init__()
        self._inner, self._prefix, self._patience = store, prefix, patience

    def set(self, key: str, value: str | bytes) -> None:
        self._inner.set(self._prefix + key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._inner.get(self._prefix + key)

    def check(self, keys: list[str]) -> bool:
        return self._inner.check([self._prefix + key for key in keys])

    def add(self, key: str, value: int) -> int:
        return self._inner.add(self._prefix + key, value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._patience.until(lambda: self.check(keys))


def _copied(copies: dict[int, torch.Tensor], value: Any) -> Any:
    """A copy of a tensor in the memory of the CPU; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    if id(value) not in copies:
        plain = value.detach()
        if not plain.is_cpu:
            copies[id(value)] = to_host(plain)
        else:
            flat = {"memory_format": torch.contiguous_format} if _is_dense(value) else {}
            copies[id(value)] = plain.clone(**flat)
    return copies[id(value)]


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided
