"""The journal of a rank: what must not be lost. Scalars, groups, configuration, start facts.

A record is a msgpack map with `kind` and `at` (seconds since the epoch). The file is
`metrics/<launch>/<rank>.<generation>.journal` in the run's directory. If the file cannot be written (no run, full or
read-only disk), records are counted as dropped and training continues.
"""

import os
import time
from contextlib import suppress
from pathlib import Path
from threading import RLock
from typing import Any

import msgspec

from argosy.observe.journal import Journal

RETRY_S = 10.0


def metrics_directory(run_directory: str | os.PathLike[str], launch: int) -> Path:
    """Where the records of one launch are."""
    return Path(run_directory) / "metrics" / str(launch)


def own_directory() -> Path | None:
    """Where the records of this process's launch are; None if it belongs to no run."""
    if rank_journal.directory is not None:
        return rank_journal.directory
    directory, run = os.environ.get("ARGOSY_RUN_DIR"), os.environ.get("ARGOSY_RUN", "")
    launch = run.rpartition("-")[2]
    return metrics_directory(directory, int(launch)) if directory and launch.isdigit() else None


class RankJournal:
    """Opened at the first record; in a forked child it writes nothing."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._journal: Journal | None = None
        self._pid = 0
        self.directory: Path | None = None
        """Where the records of the launch are, if not where the environment says."""
        self._retry_at = 0.0
        self.dropped = 0

    def write(self, kind: str, **fields: Any) -> None:
        """Append a record; never raises."""
        with suppress(Exception), self._lock:
            journal = self._open()
            if journal is None:
                self.dropped += 1
                return
            try:
                journal.append(msgspec.msgpack.encode({"kind": kind, "at": time.time(), **fields}, enc_hook=str))
            except OSError:
                self.dropped += 1

    def _open(self) -> Journal | None:
        if self._journal is not None:
            return self._journal if self._pid == os.getpid() else None
        folder = own_directory()
        if folder is None or self._pid not in (0, os.getpid()) or time.monotonic() < self._retry_at:
            return None
        self._retry_at = time.monotonic() + RETRY_S
        name = f"{os.environ.get('RANK', '0')}.{os.environ.get('ARGOSY_GENERATION', '0')}.journal"
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            self._journal, self._pid = Journal(folder / name), os.getpid()
        return self._journal


rank_journal = RankJournal()
"""The journal of this process."""
