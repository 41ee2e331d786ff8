"""A rank's life depends on its supervisors: when the last of them is gone, the kernel kills its process group.

Warden, agent and zygotes hold the write end of one FIFO; each rank holds a read end of its own with O_ASYNC,
its process group as owner and SIGKILL as signal. No thread, no polling, and it survives an exec.
"""

import contextlib
import fcntl
import os
import resource
import signal
from pathlib import Path

_F_SETSIG = 10


def _fifo(runtime: Path) -> Path:
    return runtime / "lifeline"


def hold_lifeline(runtime: Path) -> int:
    """Become one of those whose presence keeps the ranks alive; returns the descriptor to keep."""
    path = _fifo(runtime)
    if not path.exists():
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path, 0o600)
    # Read-write, so that opening neither blocks nor depends on who else is there.
    return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)


def tie_lifeline(runtime: Path) -> None:
    """Tie this process's group to the holders. Call after setpgid and after closing inherited write ends."""
    fd = os.open(_fifo(runtime), os.O_RDONLY | os.O_NONBLOCK)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    high = fcntl.fcntl(fd, fcntl.F_DUPFD, min(200, soft - 8))  # Low numbers are what a script's own files would get.
    os.close(fd)
    os.set_inheritable(high, True)
    fcntl.fcntl(high, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(high, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(high, fcntl.F_SETFL, fcntl.fcntl(high, fcntl.F_GETFL) | os.O_ASYNC)
