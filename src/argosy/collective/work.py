"""The `Work` that torch waits for, and the thread on which a group's operations run in order."""

import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from argosy.core import DeadlinePassed


class Work(dist.Work):
    """One operation. `result` are its tensors, which are also the value of the future."""

    _changing = threading.Lock()  # Shared by all works: it is held for moments.

    def __init__(self, result: list[torch.Tensor], name: str = "a collective", site: str = "") -> None:
        super().__init__()
        self._result, self._name, self._site = result, name, site
        self._ended = False
        self._end: threading.Event | None = None
        self._error: BaseException | None = None
        self._future: Any = None
        self._source = -1
        self.on_wait: Callable[[bool], None] | None = None
        self._inner: Any = None
        self._failed_late: Callable[[RuntimeError], None] | None = None

    def follow(self, inner: Any, failed_late: Callable[[RuntimeError], None]) -> None:
        """Have callers wait for a work of torch, whose operation is on their stream; before `finish`."""
        self._inner, self._failed_late = inner, failed_late

    def finish(self, error: BaseException | None = None, source: int = -1) -> None:
        """Record the outcome and wake the waiting threads; called once."""
        with self._changing:
            self._error, self._source = error, source
            self._ended = True
            future, end = self._future, self._end
        if end is not None:
            end.set()
        if future is not None:
            self._fill(future)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if not self._ended:
            with self._changing:
                if self._end is None:
                    self._end = threading.Event()
                    if self._ended:
                        self._end.set()
            self._sleep(self._end, timeout.total_seconds())
        if self._error is not None:
            raise self._error
        if self._inner is not None:
            try:
                self._inner.wait()
            except RuntimeError as error:
                assert self._failed_late is not None
                self._failed_late(error)
        return True

    def _sleep(self, end: threading.Event, seconds: float) -> None:
        if self.on_wait is not None:
            self.on_wait(True)
        try:
            if not end.wait(seconds if seconds > 0 else None):
                raise DeadlinePassed(f"{self._name}, called at {self._site or '?'}", seconds)
        finally:
            if self.on_wait is not None:
                self.on_wait(False)

    def get_future(self) -> Any:
        if self._inner is not None:
            return self._inner.get_future()
        with self._changing:
            if self._future is not None:
                return self._future
            self._future = torch.futures.Future()
            ready = self._ended
        if ready:
            self._fill(self._future)
        return self._future

    def _fill(self, future: Any) -> None:
        if self._error is not None:
            future.set_exception(self._error)
        else:
            future.set_result(self._result)

    def is_completed(self) -> bool:
        return self._ended

    def is_success(self) -> bool:
        return self._ended and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[torch.Tensor]:
        return self._result

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank


class JobQueue:
    """Runs jobs in order on a thread of its own, which starts with the first job."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._open = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    def idle(self) -> bool:
        return not self._open

    def put(self, job: Callable[[], None]) -> None:
        with self._changed:
            self._jobs.append(job)
            self._open += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()
        if threading.current_thread() is self._thread:
            # The callback of a future issued this job and may wait for it, so it must run here and now.
            while self._take_turn():
                pass

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is queued or running; False if that took too long."""
        with self._changed:
            return self._changed.wait_for(self.idle, timeout_s)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed)
            if not self._take_turn():
                return

    def _take_turn(self) -> bool:
        """Run the next job; False if there is none."""
        with self._changed:
            if not self._jobs:
                return False
            job = self._jobs.popleft()
        try:
            job()
        finally:
            with self._changed:
                self._open -= 1
                self._changed.notify_all()
        return True
