"""`python -m argosy.checkpoint.keeper CONFIG LOCK`: become a keeper, say `ready` when it listens, leave the starter."""

import contextlib
import os
import signal
import sys
import traceback
from pathlib import Path

import msgspec
import setproctitle

from argosy.checkpoint.keeper.service import Config, Keeper
from argosy.checkpoint.keeper.start_keeper import READY, beside, forget_lock
from argosy.core import ArgosyError


def leave_cgroup() -> None:
    """Step out of the rank's own cgroup, which is killed with the rank, into that of the allocation."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        own = next(line[3:] for line in lines if line.startswith("0::"))
        for mount in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")):
            above = (mount / own.lstrip("/")).parent
            if above.name.startswith("argosy-"):
                (above.parent / "cgroup.procs").write_text("0")


def say(line: str) -> None:
    """Tell the starter."""
    os.write(1, f"{line}\n".encode())


def main() -> None:
    if os.fork():
        os._exit(0)  # The starter waits for this one; the keeper is nobody's child.
    leave_cgroup()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    config = msgspec.json.decode(sys.argv[1], type=Config)
    setproctitle.setproctitle(f"argosy: keeper of {config.place} at {config.socket}")
    os.chdir("/")
    try:
        keeper = Keeper(config)
    except (ArgosyError, OSError) as error:
        say(str(error))
        os._exit(1)
    os.close(int(sys.argv[2]))  # The starter's lock: the next look for a keeper finds this one.
    with contextlib.suppress(BrokenPipeError):  # The starter may be dead already.
        say(READY)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    try:
        keeper.run()
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # Threads that still write would crash in the middle of the interpreter's end.
    if not keeper.is_over:  # Else these are its successor's.
        with contextlib.suppress(OSError):
            beside(Path(config.socket), "log").unlink()
        forget_lock(Path(config.socket))
    os._exit(0)  # Threads that wait for a store need not be waited for.


if __name__ == "__main__":
    main()
