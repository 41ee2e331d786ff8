"""Write what a run logs: rank 0 into the journal and the terminal; what does not fit on the disk waits in memory."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from argosy.fabric import here
from argosy.train.rows import HIGHEST, Best, Line, Log, Row, WentBack, read_log

if TYPE_CHECKING:
    from argosy.train.run import Run

LOOK_S = 1.0
RECENT = 8
"""Rows that every rank remembers."""
UNWRITTEN_MAX = 100_000
"""Rows that wait for room on the disk."""


class Scribe:
    """Every rank remembers the last rows: whoever follows a lost rank 0 writes those that it had no time for."""

    def __init__(self, run: "Run") -> None:
        self._run = run
        self._log: Log | None = None
        self.recent: list[Row] = []
        self._unwritten: list[Row | WentBack] = []
        self._line = Line()
        self._looked_at = 0.0

    def note(self, row: Row, until: int | None) -> None:
        """A row counts."""
        run = self._run
        for name, value in row.values.items():
            for key, highest in ((name, False), (name + HIGHEST, True)):
                best = run.ledger.bests.get(key) or run.ledger.bests.setdefault(key, Best())
                best.see(value, row.step, highest=highest)
        self.recent = [*self.recent[1 - RECENT :], row]
        if run.rank != 0:
            return
        self.write([row])
        line = self._line.due(run.step, until, row.values, time.monotonic())
        if line:
            run.tell(line)

    def went_back(self, step: int, reason: str = "") -> None:
        """Later steps are done again."""
        if self._run.rank == 0:
            self.write([WentBack(step, time.time(), reason)])
        self.recent = [row for row in self.recent if row.step <= step]

    def write(self, rows: Sequence[Row | WentBack]) -> None:
        """Into the journal; on a full disk they wait in memory until there is room."""
        self._look(time.monotonic())
        waited = bool(self._unwritten)
        self._unwritten += rows
        try:
            while self._unwritten:
                self._log = self._log or Log(self._run.directory, here().directory)
                self._log.write(self._unwritten[0])
                self._unwritten.pop(0)
        except OSError as error:
            if not waited:
                self._run.tell(f"log rows from step {self._unwritten[0].step} on wait in memory: {error.strerror}")
            del self._unwritten[:-UNWRITTEN_MAX]

    def catch_up(self) -> None:
        """Write the rows that a lost rank 0 had no time for."""
        known = {row.step for row in read_log(self._run.directory)}
        self.write([row for row in self.recent if row.step not in known and row.step <= self._run.step])

    def _look(self, now: float) -> None:
        """Somebody may have removed the directory: what is written to it would be seen by nobody."""
        if self._log is None or now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        if not self._log.is_there():
            self._log.close()
            self._log = None
            run = self._run
            run.tell(
                f"{run.directory} was removed around step {run.step:,}, with its log and checkpoints: "
                "training continues, and makes it again"
            )


def merge_recent(said: Sequence[Sequence[Row]]) -> list[Row]:
    """The last rows, of each step those of the first rank that has some: one that was just replaced has none."""
    found: dict[int, list[Row]] = {}
    for rows in reversed(said):
        found |= {row.step: [each for each in rows if each.step == row.step] for row in rows}
    return [row for step in sorted(found) for row in found[step]][-RECENT:]
