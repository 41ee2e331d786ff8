"""What carries the operations of one group and generation: the protocol that shared memory, Gloo and NCCL implement."""

from collections.abc import Callable
from typing import Protocol

from argosy.collective.plans import OperationPlan


class Engine(Protocol):
    """One operation at a time, in the same order on all ranks. Re-forming a group replaces its engines."""

    @property
    def on_loss(self) -> Callable[[], None]:
        """Called once, on any thread, when a rank is lost."""
        ...

    @on_loss.setter
    def on_loss(self, call: Callable[[], None], /) -> None: ...

    def run(self, plan: OperationPlan, timeout_s: float, site: str = "") -> int:
        """Carry a plan out; returns the sender if it received from any rank, else -1.

        Raises:
            PeerLost, DeadlinePassed: the group is lost.
            CollectiveMismatch: the ranks called different operations; the group stays usable.
        """
        ...

    def check(self) -> None:
        """Raise the loss, if there is one."""
        ...

    def abort(self, cause: str) -> None:
        """End the waits of all ranks: the group is given up."""
        ...

    def close(self) -> None:
        """Leave in peace: the other ranks see no loss."""
        ...
