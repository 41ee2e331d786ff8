"""A rank's life depends on its supervisors: when the last of them is gone, the kernel kills its process group.

Warden, agent and zygotes hold the write end of one FIFO; each rank holds a read end of its own with O_ASYNC,
its process group as owner and SIGKILL as signal. No thread, no polling, and it survives an exec.

The FIFO also tells who belongs to a runtime directory: each zygote locks the byte of its pid. If the FIFO at the
path is another one, or none, the directory was removed.
"""

import contextlib
import fcntl
import os
import resource
import signal
import struct
from pathlib import Path

_F_SETSIG = 10
_LOCK = "hhqqi"
"""The kernel's `struct flock`: type, whence, start, length, pid."""


def _fifo(runtime: Path) -> Path:
    return runtime / "lifeline"


class Lifeline:
    """What one of those holds whose presence keeps the ranks alive; held until the process ends."""

    def __init__(self, runtime: Path, *, zygote: bool = False) -> None:
        self._path = _fifo(runtime)
        if not self._path.exists():
            with contextlib.suppress(FileExistsError):
                os.mkfifo(self._path, 0o600)
        # Read-write, so that opening neither blocks nor depends on who else is there.
        self._fd = os.open(self._path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        if zygote:
            fcntl.lockf(self._fd, fcntl.LOCK_SH, 1, os.getpid())  # A forked rank does not inherit it.

    @property
    def in_place(self) -> bool:
        """Whether it is still the one in the runtime directory: else that was removed."""
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(self._path))
        except OSError:
            return False

    @property
    def replaced(self) -> bool:
        """Whether others have made the runtime directory theirs."""
        return not self.in_place and self._path.exists()

    def zygotes(self) -> list[int]:
        """The pids of all zygotes that hold it, also of those whose warden was killed."""
        pids: list[int] = []
        ranges = [(0, 0)]  # First byte and length; 0 is up to the end.
        while ranges:
            begin, length = ranges.pop()
            ask = struct.pack(_LOCK, fcntl.F_WRLCK, os.SEEK_SET, begin, length, 0)
            kind, _, start, _, pid = struct.unpack(_LOCK, fcntl.fcntl(self._fd, fcntl.F_GETLK, ask))
            if kind == fcntl.F_UNLCK:
                continue
            if pid > 0:  # Else it is of another namespace.
                pids.append(pid)
            # The kernel tells one of those in the range, not always the first: ask on both sides of it.
            after = start + 1
            ranges += [(begin, start - begin)] * (start > begin)
            ranges += [(after, begin + length - after if length else 0)] * (not length or begin + length > after)
        return pids


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
    with contextlib.suppress(BlockingIOError):  # Nobody writes: this is the end of the file, or nothing.
        if not os.read(high, 1):  # The last holder ended before the kernel was asked to tell.
            os.killpg(os.getpgrp(), signal.SIGKILL)
