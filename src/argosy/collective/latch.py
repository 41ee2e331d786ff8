"""A step as a transaction: losses inside it are kept, not raised, and a vote decides whether it is committed.

L1  While the latch is set, no operation of any group raises a loss: it is answered locally and at once.
L2  All survivors see the same outcome of a vote: once all ranks have arrived at it, no abort changes it.
L3  An exception after a loss is a consequence of it and is suppressed at the end of the block; one of `apply` is not.
L4  After `hold` an operation that meets a loss raises it, and the latch is torn: what this rank holds belongs to no
    step. Only an asynchronous collective is still answered, because DDP's reducer does not survive an exception.
"""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from argosy.collective import registry
from argosy.core import ArgosyError, DeadlinePassed, PeerLost

if TYPE_CHECKING:
    from argosy.collective.group import Group

_DRAIN_S = 3600.0


class Latch:
    """One attempt at a step. `committed` tells whether it was committed, `loss` why not."""

    def __init__(self, group: "Group") -> None:
        self._group = group
        self.loss: ArgosyError | None = None
        self.committed = False
        self.issued = 0
        """Operations begun since the latch was set."""
        self.mismatch: ArgosyError | None = None
        """Ranks called different collectives."""
        self._torn = False
        self._held = False
        self._drained = 0
        self._agreed = False

    def __enter__(self) -> "Latch":
        if registry.state.latch is not None:
            raise RuntimeError("a latch is already set in this process")
        registry.state.latch = self
        for group in registry.groups():
            if group.loss is not None:
                self.trip(group.loss)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.drain()
        registry.state.latch = None
        return self.loss is not None and not self._agreed and isinstance(error, Exception)  # L3

    def trip(self, loss: ArgosyError) -> None:
        """Keep the first loss, and end the waits of every group: the step cannot be committed any more."""
        if self.loss is None:
            self.loss = loss.with_traceback(None)  # Its frames would keep the engine and its memory alive.
        for group in registry.groups():
            group.give_up(self.loss)

    def hold(self) -> None:
        """All ranks have agreed to apply: from now on a loss is raised (L4)."""
        self._held = True

    def is_torn(self) -> bool:
        """Whether an operation after `hold` has failed (L4), also one that nobody has waited for."""
        self.drain()
        return self._torn

    def answers(self, *, synchronous: bool) -> bool:
        """Whether an operation that meets a loss is answered locally."""
        self._torn = self._torn or self._held
        return not (self._held and synchronous)

    def vote(self, apply: Callable[[], object] | None = None, *, ready: bool = True) -> bool:
        """Call `apply` if all ranks are here and ready; otherwise change nothing and return False."""
        answer = self.ask([int(ready)])
        if answer is not None:
            self._agreed = bool(answer[0])
            if self._agreed and apply is not None:
                apply()
            self.committed = self._agreed
        return self.committed

    def ask(self, words: Sequence[int]) -> list[int] | None:
        """Return the minimum of each word over all ranks; None if a rank is lost."""
        self.drain()
        if self.mismatch is not None:
            raise self.mismatch
        if self.loss is not None:
            return None
        try:
            return self._group.agree(words)
        except (PeerLost, DeadlinePassed) as loss:
            self.trip(loss)
            return None

    def drain(self) -> None:
        """Wait until all operations that were issued have ended."""
        if self._drained != self.issued:  # Each look at a queue takes a lock.
            self._drained = self.issued
            for group in registry.groups():
                group.drain(_DRAIN_S)
