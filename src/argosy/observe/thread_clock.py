"""What the kernel says of the threads of this process: how long they ran, and how long they waited for a core."""

import os
import time
from contextlib import suppress
from threading import enumerate as enumerate_threads
from threading import get_native_id

STEP_CPU, STEP_DELAY = "step cpu ns", "step core wait ns"
"""Counters at the end of each step: how long the training thread has run, and has been ready to run without a core."""
THREADS_CPU = "python threads cpu"
"""A counter: nanoseconds that Python threads besides the training thread have run."""


class ThreadClock:
    """The times of the thread that asks; another thread, or a forked child, opens a file of its own."""

    def __init__(self) -> None:
        self._owner, self._fd = (0, 0), -1

    def read(self) -> tuple[int, int]:
        """Nanoseconds that this thread has run, and has waited for a core (0 if the kernel does not count that)."""
        owner = os.getpid(), get_native_id()
        if owner != self._owner:
            self._open(owner)
        if self._fd >= 0:
            with suppress(OSError, ValueError):
                ran, waited, _ = os.pread(self._fd, 64, 0).split()
                return int(ran), int(waited)
        return time.thread_time_ns(), 0

    def _open(self, owner: tuple[int, int]) -> None:
        # The number may belong to another file by now: a rank closes what it does not know after a fork.
        self._owner, self._fd = owner, -1
        with suppress(OSError):
            self._fd = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)


def other_threads_cpu_ns() -> int:
    """CPU time of the Python threads of this process besides this one: all of them need the GIL."""
    total, mine = 0, get_native_id()
    for thread in enumerate_threads():
        if thread.native_id is not None and thread.native_id != mine:
            with suppress(OSError, ValueError), open(f"/proc/self/task/{thread.native_id}/schedstat") as file:
                total += int(file.read().split()[0])
    return total
