"""Reading and signalling processes by (pid, start time), so that a reused pid is never taken for the old process."""

import contextlib
import errno
import os
import select
import signal

from argosy.core import WaitStatus
from argosy.supervise.messages import ProcessId


def start_ticks(pid: int) -> int | None:
    """The process's start time in clock ticks since boot, or None if it is gone."""
    try:
        stat = _stat(pid)
    except OSError:
        return None
    return int(stat[stat.rindex(b")") + 2 :].split()[19])


def _stat(pid: int) -> bytes:
    fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY)  # A third of the calls of a file object: asked for every rank.
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)


def process_id(pid: int) -> ProcessId:
    """Identify a process that exists, such as a child that was not reaped."""
    return ProcessId(pid, start_ticks(pid) or 0)


def open_process(process: ProcessId) -> int | None:
    """A pidfd of the process, or None if it is gone.

    Raises:
        OSError: no descriptor is left.
    """
    try:
        fd = os.pidfd_open(process.pid)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise
        return None
    if start_ticks(process.pid) != process.start:
        os.close(fd)
        return None
    return fd


def is_alive(process: ProcessId) -> bool:
    """Whether the process exists and has not ended."""
    return start_ticks(process.pid) == process.start and zombie_status(process.pid) is None


def send_signal(process: ProcessId, signum: int) -> bool:
    """Send a signal to the process; False if it is gone."""
    try:
        fd = open_process(process)
    except OSError:  # Without a descriptor the pid has to do.
        if start_ticks(process.pid) == process.start:
            os.kill(process.pid, signum)
            return True
        return False
    if fd is None:
        return False
    try:
        signal.pidfd_send_signal(fd, signum)
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)
    return True


def end_process(process: ProcessId, patience_s: float = 1.0) -> None:
    """Kill a process that holds no state, and wait until it let go of what it had open."""
    fd = open_process(process)
    if fd is None:
        return
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(fd, signal.SIGKILL)
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    poller.poll(patience_s * 1000)
    os.close(fd)


def zombie_status(pid: int) -> WaitStatus | None:
    """The wait status of a process that ended and was not reaped, as /proc tells it."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        stat = _stat(pid)
        fields = stat[stat.rindex(b")") + 2 :].split()
        if fields[0] == b"Z":
            return WaitStatus.from_wait(int(fields[49]))
    return None
