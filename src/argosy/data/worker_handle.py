"""A worker process as its loader sees it: started, asked for microbatches, watched, ended."""

import contextlib
import mmap
import os
import pickle
import signal
import socket
import time
import weakref
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from argosy.core import PeerLost, WaitStatus
from argosy.data.microbatch import Microbatch
from argosy.data.plan import Rows
from argosy.data.slab import SlabReader
from argosy.data.worker_messages import (
    BEATS,
    IDLE,
    PROGRESS_BYTES,
    REQUEST,
    SAMPLE,
    FreeSlab,
    FromWorker,
    Load,
    Loaded,
    LoadFailed,
    WorkerStarted,
    from_worker,
)
from argosy.data.worker_template import WorkerTemplate
from argosy.fabric import Link


@dataclass(slots=True)
class WorkerAnswer:
    """A worker's answer to one request: a batch or an error."""

    number: int
    size: int = 0
    content: Any = None
    error: LoadFailed | None = None
    rows: Rows | None = None

    def unwrap(self) -> Microbatch:
        """Return the batch, or raise the error that the source raised in the worker."""
        assert self.rows is not None
        if self.error is None:
            batch, skipped, extra = self.content
            return Microbatch(batch, self.rows, skipped, extra)
        error, cause = pickle.loads(self.error.error)
        error.add_note(f"in a worker process:\n{self.error.trace.rstrip()}")
        raise error from cause


REPORT_S = 1.0
"""How long the template may take to report how a worker ended."""


class WorkerHandle:
    """A worker process, or one that is being started."""

    def __init__(self, template: WorkerTemplate, number: int) -> None:
        self._template, self._number = template, number
        self.asked: list[int] = []
        self.started = False
        self._lost_at: float | None = None
        self._slabs: dict[int, SlabReader] = {}
        self._freed: deque[int] = deque()
        progress = os.memfd_create("argosy-progress", os.MFD_CLOEXEC)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            os.ftruncate(progress, PROGRESS_BYTES)
            self._progress = np.frombuffer(mmap.mmap(progress, PROGRESS_BYTES), np.int64)
            self._progress[REQUEST] = IDLE
            template.fork(number, (theirs.fileno(), progress))
        finally:
            theirs.close()
            os.close(progress)
        self.link: Link[FromWorker] = Link(ours, from_worker, "a data worker")
        self._seen = (0, time.monotonic())

    @property
    def pid(self) -> int | None:
        """The process id; None until the worker has started."""
        return self._template.pids.get(self._number)

    def ask(self, number: int, rows: Rows, hint: Any = None) -> None:
        """Send a request. If the worker is gone, `ended` tells."""
        if not self.asked:
            self._seen = (int(self._progress[BEATS]), time.monotonic())
        self.asked.append(number)
        packed = b"" if hint is None else pickle.dumps(hint)
        self._send(Load(number, np.ascontiguousarray(rows).tobytes(), rows.shape[1], packed))

    def answers(self) -> list[WorkerAnswer]:
        """Return the answers that have arrived, and give slabs that are no longer used back to the worker."""
        while self._freed:
            self._send(FreeSlab(self._freed.popleft()))
        try:
            self.link.flush()
            messages = self.link.receive()
        except PeerLost:
            self._lost_at = self._lost_at or time.monotonic()
            return []
        return [answer for message, fds in messages if (answer := self._understand(message, fds)) is not None]

    def _understand(self, message: FromWorker, fds: list[int]) -> WorkerAnswer | None:
        match message:
            case WorkerStarted():
                self.started = True
                self._seen = (self._seen[0], time.monotonic())
                return None
            case LoadFailed():
                self.asked.remove(message.number)
                return WorkerAnswer(message.number, error=message)
            case Loaded():
                self.asked.remove(message.number)
                if fds:
                    self._slabs[message.slab] = SlabReader(fds[0])
                size = sum(size for _, size in message.places)
                release = partial(_release, weakref.ref(self._freed), message.slab)
                content = self._slabs[message.slab].load(message.content, list(message.places), release)
                return WorkerAnswer(message.number, size, content)

    def _send(self, message: object) -> None:
        try:
            self.link.send(message)
        except PeerLost:
            return

    def ended(self) -> WaitStatus | None:
        """How it ended, or None: from the template's report, or else from the end of its link."""
        if (status := self._template.ends.get(self._number)) is not None:
            return status
        if self._lost_at is None or time.monotonic() - self._lost_at < REPORT_S:
            return None
        return WaitStatus()

    @property
    def listens(self) -> bool:
        return self._lost_at is None

    def silent_s(self, now: float) -> float:
        """How long it has had work without any progress; 0 until it has started."""
        beats = int(self._progress[BEATS])
        if not self.asked or not self.started or beats != self._seen[0]:
            self._seen = (beats, now)
        return now - self._seen[1]

    def working_on(self) -> tuple[int, int]:
        """The number of the request that it works on, and of the sample in it."""
        return int(self._progress[REQUEST]), int(self._progress[SAMPLE])

    def kill(self) -> None:
        """Kill it; the template reaps it."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the link, which ends the worker, and the slabs."""
        self.link.close()
        for slab in self._slabs.values():
            slab.close()
        self._slabs.clear()


def _release(freed: "weakref.ref[deque[int]]", slab: int) -> None:
    """Note a slab that is no longer used. Called when its last array is garbage-collected: it must not do more."""
    if (queue := freed()) is not None:
        queue.append(slab)
