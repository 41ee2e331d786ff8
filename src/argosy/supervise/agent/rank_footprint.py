"""What a rank leaves on the host besides its process: a cgroup, a progress page, descendants. How all of it ends."""

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from argosy.core import ProcessId, RankId
from argosy.supervise.cgroup import KILLED_S, kill_leaf, kill_marked, make_leaf, remove_leaf
from argosy.supervise.processes import send_signal

LEAVE_S = 0.5


class RankFootprint:
    """Those of the ranks of one run."""

    def __init__(self, run: str, memory: Path, cgroup: Path | None) -> None:
        self._run, self._memory, self._cgroup = run, memory, cgroup
        self.groups: dict[RankId, int] = {}
        """The process groups of all ranks that were seen to live here, by their leader's pid."""
        self.ordered: set[RankId] = set()
        """Ranks that may have lived here although nobody saw them: their zygote was killed before it told of them."""

    def prepare(self, rank: RankId) -> str:
        """Make the rank's cgroup; the empty string where there are none.

        Of those who had its place only the last one's page is kept: a long run replaces many.
        """
        self.ordered.add(rank)
        if rank.generation >= 2:  # The first launch looks through no directory for each of its ranks.
            for past in self._memory.glob(f"{rank.index}.{rank.generation - 2}.page*"):
                past.unlink(missing_ok=True)
        return make_leaf(self._cgroup, self._name(rank))

    def page(self, rank: RankId) -> str:
        """The file of the rank's progress page."""
        return str(self._memory / f"{rank.index}.{rank.generation}.page")

    def kill(self, rank: RankId, process: ProcessId | None) -> None:
        """End a rank, also if its process is not known. Descendants that hide are left to `sweep`."""
        if leaf := self.leaf(rank):
            kill_leaf(leaf)
        if process is not None and send_signal(process, 9):
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)

    @property
    def must_sweep(self) -> bool:
        """Whether descendants can hide; where there are cgroups they cannot."""
        return self._cgroup is None

    def sweep(self, ranks: Iterable[RankId]) -> None:
        """Kill whatever of these ranks can be found by its mark. May block."""
        kill_marked({f"{self._run}/{rank}": self.page(rank) for rank in ranks})

    def clear(self) -> None:
        """Kill what ranks left behind and ranks that nobody saw, remove their cgroups. Blocks for a second at most.

        Those who leave by themselves get a moment: multiprocessing's tracker, which ends when its rank has, has yet to
        remove the semaphores that the rank leaked.
        """
        ranks = {*self.groups, *self.ordered}
        if self._cgroup is None:
            groups = [group for group in self.groups.values() if _has_group(group)]
            if groups:
                time.sleep(LEAVE_S)
            for group in groups:
                with contextlib.suppress(OSError):
                    os.killpg(group, signal.SIGKILL)
            deadline = time.monotonic() + KILLED_S
            while any(map(_has_group, groups)) and time.monotonic() < deadline:
                time.sleep(0.002)
            self.sweep(ranks)
            return
        leaves = self._remove({self.leaf(rank) for rank in ranks}, LEAVE_S)
        for leaf in leaves:
            kill_leaf(leaf)
        self._remove(leaves, KILLED_S)

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
