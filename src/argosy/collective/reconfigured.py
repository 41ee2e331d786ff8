"""The engine over a backend of torch that can be re-formed by torch's own `reconfigure`: NCCL (`nccl2`).

The backend outlives a generation. Its operations go onto the caller's stream and return before they are done, so its
works are handed to the caller. `abort` revokes the communicator: kernels that wait for the lost rank end.

This has never run on a GPU. Tests run the same calls on Gloo, whose `reconfigure` has limits (docs/limits.md).
"""

# pyright: reportPrivateImportUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from argosy.collective._torch import make_nccl, reconfigure_options
from argosy.collective.plans import OperationPlan
from argosy.collective.rendezvous import Meeting
from argosy.collective.torch_work import Patience, Watch, WatchedEngine

MakeBackend = Callable[[Any, int, int, timedelta], Any]
"""Make a backend that waits for `reconfigure`, of a store, a rank, a size and a timeout."""


def reconfigure(backend: Any, store: Any, meeting: Meeting, patience: Patience) -> None:
    """Have torch form a group, or a backend of one, of the processes that meet; all of them call this.

    Raises:
        PeerLost, DeadlinePassed: a rank did not come.
    """
    keys = [f"argosy/handle/{meeting.generation}/{rank}" for rank in range(meeting.size)]
    store.set(keys[meeting.rank], backend.get_reconfigure_handle())
    patience.until(lambda: store.check(keys))
    handles = [store.get(key).decode() for key in keys]
    options = reconfigure_options(meeting.generation, handles, patience.timeout_s)
    try:
        patience.call(lambda: backend.reconfigure(options).wait())
    except RuntimeError as error:
        patience.explain(error)


class Backends:
    """The backends of one group, by device type; they stay when its engines are replaced."""

    def __init__(self, makers: "dict[str, MakeBackend] | None" = None) -> None:
        self._makers = {"cuda": make_nccl} if makers is None else makers
        self._made: dict[str, Any] = {}

    def serve(self, device_type: str) -> bool:
        """Whether torch has a backend for these devices that can be re-formed."""
        return device_type in self._makers

    def of(self, device_type: str, store: Any, meeting: Meeting, timeout: timedelta) -> Any:
        if device_type not in self._made:
            self._made[device_type] = self._makers[device_type](store, meeting.rank, meeting.size, timeout)
        return self._made[device_type]


class Reconfigured(WatchedEngine):
    """A backend of torch as one generation of a group uses it."""

    def __init__(self, watch: Watch, backend: Any, store: Any, meeting: Meeting, timeout_s: float) -> None:
        """Meet the other ranks, which all make this engine when they first need it.

        Raises:
            PeerLost, DeadlinePassed: a rank did not come.
        """
        super().__init__(watch)
        self._backend = backend
        reconfigure(backend, store, meeting, Patience(watch, "the accelerators' group to be formed", timeout_s))

    def run(self, plan: OperationPlan, timeout_s: float, site: str = "") -> int:
        method, arguments = plan.torch_call
        patience = Patience(self.watch, f"{plan.name}" + (f" at {site}" if site else ""), timeout_s)
        try:
            plan.torch_work = getattr(self._backend, method)(*arguments)
        except RuntimeError as error:
            patience.explain(error)
        plan.explain = patience.explain
        return -1

    def revoke(self) -> None:
        """End the kernels that wait for a lost rank."""
        with suppress(RuntimeError):
            self._backend.abort()

    def abort(self, cause: str) -> None:
        super().abort(cause)
        self.revoke()
