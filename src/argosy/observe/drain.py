"""The drain: one process per run and host that moves records from the ranks' rings to files in the run's directory.

It writes `metrics/<launch>/spans` and `metrics/<launch>/samples`, both column files. It ends when it is told to (a file
`drain.end` beside the rings), when the rings are removed, or when no rank has lived for a while.

D1  One drain per run: a lock beside the rings; a second one ends at once with ANOTHER.
D2  A drain that was killed loses nothing that is still in the rings: its successor continues where the file ends.
D3  A full or read-only disk never stops it: records that cannot be written are counted as lost.
"""

import fcntl
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from argosy.observe.columns import encode_frame, read_headers
from argosy.observe.cpu_peak import cpu_peak
from argosy.observe.host_samples import HostSamples, is_alive
from argosy.observe.journal import Journal
from argosy.observe.rank_journal import metrics_directory
from argosy.observe.ring_reader import RingReader
from argosy.observe.start_facts import gather_facts

TURN_S = 0.25
SAMPLE_S = 1.0
FLUSH_S = 5.0
ORPHAN_S = 60.0
ANOTHER = 3
LOCK_S = 5.0
END_FILE, LOCK_FILE, RINGS = "drain.end", "drain.lock", "*.page.spans"


class Drain:
    """The rings of one run on this host, and the files they go to."""

    def __init__(self, memory: Path, directory: Path) -> None:
        self._memory, self._directory = memory, directory
        self._rings: dict[tuple[int, int], RingReader] = {}
        self._named: dict[tuple[int, int], int] = {}
        self._journals: dict[str, Journal] = {}
        self._samples = HostSamples()
        self._unwritten: dict[tuple[int, int], int] = {}
        self._done = self._already_written()

    def turn(self) -> None:
        """Move what is new."""
        for path in sorted(self._memory.glob(RINGS)):
            rank, generation = (int(part) for part in path.name.split(".")[:2])
            key = rank, generation
            if key not in self._rings:
                with suppress(OSError, ValueError):
                    self._rings[key] = RingReader(path, self._done.get(key, 0))
        for key, ring in self._rings.items():
            self._move(key, ring)

    def _move(self, key: tuple[int, int], ring: RingReader) -> None:
        before, columns = ring.lost, ring.take()
        if columns is None:
            return
        lost = ring.lost - before + self._unwritten.pop(key, 0)
        names = ring.names()
        about = {
            "rank": key[0],
            "generation": key[1],
            "pid": ring.pid,
            "next": ring.next,
            "lost": lost,
            "wall": ring.wall,
            "monotonic": ring.monotonic,
            "names": names[self._named.get(key, 0) :],
            "first_name": self._named.get(key, 0),
        }
        if self._write("spans", encode_frame("spans", columns, about)):
            self._named[key] = len(names)
        else:  # D3
            self._unwritten[key] = lost + len(columns["time"])

    def write_once(self, name: str, facts: Callable[[], dict[str, Any]]) -> None:
        """Write a small file, unless an earlier drain has."""
        path = self._directory / name
        if not path.exists():
            found = facts()
            with suppress(OSError):
                self._directory.mkdir(parents=True, exist_ok=True)
                path.write_bytes(msgspec.json.encode(found))

    def sample(self) -> None:
        """Measure host and ranks now."""
        living = [
            (rank, generation, ring.pid) for (rank, generation), ring in self._rings.items() if is_alive(ring.pid)
        ]
        self._samples.sample(living)

    def flush(self) -> None:
        """Write the samples."""
        clocks = {"wall": time.time_ns(), "monotonic": time.monotonic_ns(), "host": os.uname().nodename}
        for what, columns in self._samples.take().items():
            self._write("samples", encode_frame(what, columns, clocks))

    def has_living_ranks(self) -> bool:
        return any(is_alive(ring.pid) for ring in self._rings.values())

    def _write(self, name: str, record: bytes) -> bool:
        try:
            journal = self._journals.get(name)
            if journal is None or not journal.is_at(self._directory / name):
                self._directory.mkdir(parents=True, exist_ok=True)
                journal = self._journals[name] = Journal(self._directory / name)
            journal.append(record)
        except OSError:
            return False
        return True

    def _already_written(self) -> dict[tuple[int, int], int]:
        """For each ring, the number of the first record that is not in the file (D2)."""
        found: dict[tuple[int, int], int] = {}
        for frame in read_headers(self._directory / "spans"):
            found[frame.about["rank"], frame.about["generation"]] = frame.about["next"]
        return found


def run_of(directory: Path) -> Path:
    """The run's directory that these records belong to, also where they are those of one of its hosts."""
    above = (path for path in directory.parents if (path / "run.json").exists())
    return next(above, directory.parent.parent)


def run_drain(memory: Path, directory: Path, orphan_s: float = ORPHAN_S) -> int:
    """Drain until the end, or until no rank has lived for `orphan_s`; returns the exit code."""
    lock = os.open(memory / LOCK_FILE, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    if not _lock(lock, memory / END_FILE):
        return ANOTHER
    work = Drain(memory, directory)
    work.write_once("start.json", lambda: gather_facts(run_of(directory)))
    work.write_once("peak.json", lambda: {"cpu_flops_per_core": cpu_peak()})  # 30 ms of a core, once per machine.
    sample_at = flush_at = 0.0
    alive_at = time.monotonic()
    while True:
        ends = (memory / END_FILE).exists() or not memory.exists()
        work.turn()
        now = time.monotonic()
        if now >= sample_at:
            sample_at = now + SAMPLE_S
            work.sample()
            alive_at = now if work.has_living_ranks() else alive_at
        if now >= flush_at or ends:
            flush_at = now + FLUSH_S
            work.flush()
        if ends or now - alive_at > orphan_s:
            return 0
        for _ in range(10):
            if not (memory / END_FILE).exists():
                time.sleep(TURN_S / 10)


def _lock(lock: int, end: Path) -> bool:
    """Take the lock; at the end of the run wait for another drain to end."""
    deadline = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if not end.exists() or time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        else:
            return True


if __name__ == "__main__":
    with suppress(OSError):
        os.nice(5)
    sys.exit(run_drain(Path(sys.argv[1]), metrics_directory(sys.argv[2], int(sys.argv[3]))))
