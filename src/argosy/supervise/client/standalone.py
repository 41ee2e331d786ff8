"""Record a run that no agent watches: under torchrun, or alone. The first rank of each host starts the drain.

As a program it is that drain: when the ranks are gone it writes how the launch ended and removes their shared memory.

S1  Whatever fails leaves the run unrecorded, and training goes on.
S2  A rank waits at most END_S for the drain when it ends.
"""

import atexit
import hashlib
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from argosy.control import LaunchEnded, LaunchStarted, RankStarted
from argosy.core import RankId
from argosy.observe import DrainProcess, Page, Ring, attached, install, metrics_directory, rank_journal, record_spans
from argosy.supervise.records.rundir import RunDir, RunRecord, index_run, next_launch, read_record

END_S = 2.0
ORPHAN_S = 3.0
OFF = "ARGOSY_RECORD"
"""The variable that turns recording off, if it is 0."""


def record_standalone(directory: Path, rank: int, size: int, gather: Callable[[Any], Sequence[Any]]) -> None:
    """Record this process from now on; all ranks call it, and `gather` brings what each says to all."""
    page = attached().read()
    if os.environ.get(OFF) == "0" or (page is not None and page.pid):
        return
    number = next_launch(directory) if rank == 0 else 0
    said = gather([number, socket.gethostname(), os.getpid(), psutil.Process().create_time()])
    with suppress(OSError, ValueError):  # S1
        _record(directory.resolve(), rank, size, said)


def _record(directory: Path, rank: int, size: int, said: Sequence[Any]) -> None:
    number, host = int(said[0][0]), said[rank][1]
    digest = hashlib.blake2s(os.fsencode(directory), digest_size=6).hexdigest()
    memory = Path("/dev/shm", f"argosy-{os.getuid()}-{digest}-{number}")
    memory.mkdir(mode=0o700, exist_ok=True)
    if memory.stat().st_uid != os.getuid():
        raise OSError(f"not yours: {memory}")
    rank_journal.directory = metrics_directory(directory, number)
    path = memory / f"{rank}.0.page"
    ring = Ring.create(f"{path}.spans")
    record_spans(ring)
    install(Page.create(path))
    if rank == 0:
        _write_begin(directory, number, size, said)
    if rank == min(index for index, each in enumerate(said) if each[1] == host):
        ring.point("recording begins")  # A drain without anything to drain would not start.
        first = host == said[0][1]
        drained = directory if first else directory / "hosts" / host
        drain = DrainProcess(
            memory, drained, number, ["argosy.supervise.client.standalone", str(directory) if first else ""]
        )
        drain.tend()
        atexit.register(_end, drain, os.getpid())


def _write_begin(directory: Path, number: int, size: int, said: Sequence[Any]) -> None:
    began, name = min(float(each[3]) for each in said), directory.name
    work = RunDir(directory)
    argv = [sys.executable, *sys.argv]
    work.write_record(
        RunRecord(
            name=name,
            argv=argv,
            cwd=os.getcwd(),
            size=size,
            host=said[0][1],
            launch=number,
            managed=True,
            state="running",
            started_at=began,
        )
    )
    work.record(LaunchStarted(at=began, launch=number, argv=argv, size=size, host=said[0][1]))
    for index, (_, _, pid, born) in enumerate(said):
        work.record(RankStarted(at=float(born), rank=RankId("main", index), pid=pid))
    work.close()
    index_run(directory, name)


def _end(drain: DrainProcess, owner: int) -> None:
    if os.getpid() == owner:  # Not in a forked child.
        drain.finish("1" if hasattr(sys, "last_type") else "0", END_S)


def write_end(directory: Path, number: int, said: str, at: float) -> None:
    """Record that a launch is over; `said` is its exit code, or nothing if all ranks vanished."""
    record = read_record(directory)
    if record.launch != number or record.state != "running":
        return
    code, reason = (int(said), "") if said.isdigit() else (1, "all ranks were killed")
    record.state, record.code, record.reason, record.ended_at = "ended", code, reason, at
    work = RunDir(directory)
    work.record(LaunchEnded(at=at, launch=number, code=code, reason=reason))
    work.write_record(record)
    work.close()


def main(memory: Path, drained: str, number: int, directory: str) -> int:
    """Drain until the ranks are gone, and clear up."""
    from argosy.observe import END_FILE, run_drain  # Needs numpy.

    code = run_drain(memory, metrics_directory(drained, number), ORPHAN_S)
    if code:
        return code
    said = ""
    with suppress(OSError):
        said = (memory / END_FILE).read_text()
    if directory:
        write_end(Path(directory), number, said, time.time())
    shutil.rmtree(memory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    with suppress(OSError):
        os.nice(5)
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]))
