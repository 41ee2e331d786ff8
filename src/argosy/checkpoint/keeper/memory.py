"""The memory of a rank's snapshots: what the keeper lent it, and its own where the keeper has none.

B1  Memory is unmapped when nobody copies into it or writes from it any more: native code has its address.
B2  A rank has two arenas of its own at most, as without a keeper; who wants a third waits.
"""

import os
from threading import Condition

from argosy.checkpoint.arena import Arena
from argosy.checkpoint.writing import ARENAS
from argosy.core import DeadlinePassed


class Memory:
    """Counts who uses each arena: the save that fills it, and the keeper's or the rank's commit of it."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._lent: dict[int, Arena] = {}
        """By the slots of the keeper that is."""
        self._own: list[Arena] = []
        """Those that nobody uses."""
        self._uses: dict[Arena, int] = {}
        self._is_closed = False

    @property
    def is_used(self) -> bool:
        return bool(self._uses)

    @property
    def is_borrowed(self) -> bool:
        """Whether memory is used that a keeper lent, be it lost."""
        with self._changed:
            return any(arena.slot for arena in self._uses)

    def is_lent(self, arena: Arena) -> bool:
        """Whether the keeper that is lent it."""
        return self._lent.get(arena.slot) is arena

    def known(self, slot: int) -> Arena | None:
        return self._lent.get(slot)

    def lent(self, arena: Arena) -> Arena:
        """The keeper lent this one, to be filled."""
        with self._changed:
            self._lent[arena.slot] = arena
            self._uses[arena] = self._uses.get(arena, 0) + 1
        return arena

    def own(self, size: int, timeout_s: float) -> Arena:
        """Memory of this rank's own, to be filled.

        Raises:
            DeadlinePassed: two earlier saves have not let go of theirs.
        """
        with self._changed:
            if not self._changed.wait_for(self._has_room, timeout_s):
                raise DeadlinePassed("an earlier save durable, so that its memory can be used again", timeout_s)
            fitting = next((each for each in self._own if each.size >= size), None)
            if fitting is not None:
                self._own.remove(fitting)
            elif len(self._own) + self._own_used() >= ARENAS:
                self._own.pop().close()  # Too small.
            arena = fitting or Arena(size)
            self._uses[arena] = 1
            return arena

    def _own_used(self) -> int:
        return sum(not arena.slot for arena in self._uses)

    def _has_room(self) -> bool:
        return self._own_used() < ARENAS

    def hold(self, arena: Arena) -> None:
        """One more uses it."""
        with self._changed:
            self._uses[arena] += 1

    def release(self, arena: Arena) -> None:
        """One is through with it."""
        with self._changed:
            self._uses[arena] -= 1
            if self._uses[arena]:
                return
            del self._uses[arena]
            if arena.slot == 0 and not self._is_closed:
                self._own.append(arena)
            elif not self.is_lent(arena):
                arena.close()
            self._changed.notify_all()

    def retire(self) -> None:
        """The keeper is lost: what it lent goes, at once or when its last user is through with it (B1)."""
        with self._changed:
            gone, self._lent = self._lent, {}
            for arena in gone.values():
                if arena not in self._uses:
                    arena.close()

    def close(self) -> None:
        """Nothing is lent any more."""
        self.retire()
        with self._changed:
            self._is_closed = True
            for arena in self._own:
                arena.close()
            self._own = []


def close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
