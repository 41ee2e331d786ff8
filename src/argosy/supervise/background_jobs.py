"""Work that may block, done in a thread while the agent's loop goes on.

The jobs of one run are done one after another, in the order in which they were asked for. The loop hears of a result
when it calls `collect`. A job that misses its deadline is given up: its thread is left to itself, the next job begins.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from argosy.core import DeadlinePassed

JOB_S = 30.0
T = TypeVar("T")


class BackgroundJob(Generic[T]):
    """One piece of work, and who hears its result or what it raised."""

    def __init__(self, what: str, work: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        self.what, self._work, self.done = what, work, done
        self.until = 0.0
        self.outcome: list[T | Exception] = []
        """Empty until the job is over."""

    def run(self, wake: Callable[[], None]) -> None:
        """In the thread: do the work."""
        try:
            self.outcome.append(self._work())
        except Exception as error:
            self.outcome.append(error)
        wake()


class BackgroundJobs:
    """The jobs of one run. `wake` is called by the thread when a job is over: the loop should `collect`."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._jobs: deque[BackgroundJob[Any]] = deque()

    @property
    def is_idle(self) -> bool:
        return not self._jobs

    def do(self, what: str, work: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        """Do `work` after what was asked for before it, then call `done` in the loop."""
        self._jobs.append(BackgroundJob(what, work, done))
        if len(self._jobs) == 1:
            self._start()

    def collect(self) -> None:
        """In the loop: call `done` for the jobs that are over, or have missed their deadline."""
        while self._jobs and (self._jobs[0].outcome or time.monotonic() > self._jobs[0].until):
            job = self._jobs.popleft()
            if self._jobs:
                self._start()
            job.done(job.outcome[0] if job.outcome else DeadlinePassed(job.what, JOB_S))

    def _start(self) -> None:
        job = self._jobs[0]
        job.until = time.monotonic() + JOB_S
        try:
            threading.Thread(target=job.run, args=(self._wake,), name=job.what, daemon=True).start()
        except RuntimeError:  # No thread can be had: better late than never.
            job.run(self._wake)
