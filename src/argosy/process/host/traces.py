"""What a rank leaves on the host besides its process: a cgroup, a progress page, descendants. How all of it ends."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

from argosy.core import RankId
from argosy.process.host.messages import Child
from argosy.process.host.proc import send_signal
from argosy.process.rank.cgroup import kill_leaf, kill_marked, make_leaf, remove_leaf

LEAVE_S = 0.5
KILLED_S = 1.0


class Traces:
    """Those of the ranks of one run."""

    def __init__(self, run: str, memory: Path, cgroup: Path | None) -> None:
        self._run, self._memory, self._cgroup = run, memory, cgroup

    def prepare(self, rank: RankId) -> str:
        """Make the rank's cgroup; the empty string where there are none.

        Of those who had its place only the last one's page is kept: a long run replaces many.
        """
        for past in self._memory.glob(f"{rank.index}.{rank.generation - 2}.page*"):
            past.unlink(missing_ok=True)
        return make_leaf(self._cgroup, self._name(rank))

    def page(self, rank: RankId) -> str:
        """The file of the rank's progress page."""
        return str(self._memory / f"{rank.index}.{rank.generation}.page")

    def kill(self, rank: RankId, child: Child | None) -> None:
        """End a rank and all its descendants, also those of a rank whose process is not known."""
        leaf = self.leaf(rank)
        if leaf:
            kill_leaf(leaf)
        if child is not None:
            send_signal(child.born, 9)
        if not leaf:
            kill_marked(f"{self._run}/{rank}", None if child is None else child.born.pid, self.page(rank))

    def clear(self, pids: Mapping[RankId, int]) -> None:
        """Kill what ranks left behind, and remove their cgroups.

        Those who leave by themselves get a moment: multiprocessing's tracker, which ends when its rank has, has yet to
        remove the semaphores that the rank leaked.
        """
        if self._cgroup is None:
            if self._groups_alive(pids):
                time.sleep(LEAVE_S)
            for rank, pid in pids.items():
                kill_marked(f"{self._run}/{rank}", pid, self.page(rank))
            return
        leaves = self._remove({self.leaf(rank) for rank in pids}, LEAVE_S)
        for leaf in leaves:
            kill_leaf(leaf)
        self._remove(leaves, KILLED_S)

    def _groups_alive(self, pids: Mapping[RankId, int]) -> bool:
        return any(_has_group(pid) for pid in pids.values())

    def _remove(self, leaves: set[str], patience_s: float) -> set[str]:
        """Remove the cgroups that are or become empty; returns those that do not."""
        deadline = time.monotonic() + patience_s
        while leaves := {leaf for leaf in leaves if not remove_leaf(leaf)}:
            if time.monotonic() > deadline:
                break
            time.sleep(0.002)
        return leaves

    def leaf(self, rank: RankId) -> str:
        return "" if self._cgroup is None else str(self._cgroup / self._name(rank))

    def _name(self, rank: RankId) -> str:
        return f"{self._run}-{rank.index}.{rank.generation}"


def _has_group(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except OSError:
        return False
    return True
