"""What a rank leaves on the host besides its process: a cgroup, a progress page, descendants. How all of it ends."""

import time
from pathlib import Path

from argosy.core import RankId
from argosy.process.host.messages import Child
from argosy.process.host.proc import send_signal
from argosy.process.rank.cgroup import kill_leaf, kill_marked, make_leaf, remove_leaf


class Traces:
    """Those of the ranks of one run."""

    def __init__(self, run: str, memory: Path, cgroup: Path | None) -> None:
        self._run, self._memory, self._cgroup = run, memory, cgroup

    def prepare(self, rank: RankId) -> str:
        """Make the rank's cgroup; the empty string where there are none."""
        return make_leaf(self._cgroup, self._name(rank))

    def page(self, rank: RankId) -> str:
        """The file of the rank's progress page."""
        return str(self._memory / f"{rank.index}.{rank.generation}.page")

    def kill(self, rank: RankId, child: Child | None) -> None:
        """End a rank and all its descendants, also those of a rank whose process is not known."""
        leaf = self._leaf(rank)
        if leaf:
            kill_leaf(leaf)
        if child is not None:
            send_signal(child.born, 9)
        if not leaf:
            kill_marked(f"{self._run}/{rank}", None if child is None else child.born.pid, self.page(rank))

    def clear(self, rank: RankId, pid: int) -> None:
        """Kill what a rank left behind, and remove its cgroup."""
        leaf = self._leaf(rank)
        if not leaf:
            kill_marked(f"{self._run}/{rank}", pid, self.page(rank))
            return
        kill_leaf(leaf)
        deadline = time.monotonic() + 1.0
        while not remove_leaf(leaf) and time.monotonic() < deadline:
            time.sleep(0.002)

    def _leaf(self, rank: RankId) -> str:
        return "" if self._cgroup is None else str(self._cgroup / self._name(rank))

    def _name(self, rank: RankId) -> str:
        return f"{self._run}-{rank.index}.{rank.generation}"
