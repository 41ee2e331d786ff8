"""One worker process as its loader sees it: started, asked, listened to, ended."""

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
from argosy.data.fill import Filled
from argosy.data.messages import (
    BEATS,
    IDLE,
    PROGRESS_BYTES,
    SAMPLE,
    TICKET,
    Failed,
    Free,
    FromWorker,
    Load,
    Loaded,
    Started,
    from_worker,
)
from argosy.data.nursery import Nursery
from argosy.data.plan import Rows
from argosy.data.slab import SlabReader
from argosy.fabric import Link


@dataclass(slots=True)
class Answer:
    """What a worker made of one ticket: a batch, or an error."""

    number: int
    size: int = 0
    content: Any = None
    error: Failed | None = None
    rows: Rows | None = None

    def unwrap(self) -> Filled:
        """Return the batch, or raise the error as the worker's source raised it."""
        assert self.rows is not None
        if self.error is None:
            batch, skipped, extra = self.content
            return Filled(batch, self.rows, skipped, extra)
        error, cause = pickle.loads(self.error.error)
        error.add_note(f"in a worker process:\n{self.error.trace.rstrip()}")
        raise error from cause


REPORT_S = 1.0
"""How long the template may take to tell how a worker ended."""


class Member:
    """A worker process, or one that was asked for and is not there yet."""

    def __init__(self, nursery: Nursery, number: int) -> None:
        self._nursery, self._number = nursery, number
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
            self._progress[TICKET] = IDLE
            nursery.fork(number, (theirs.fileno(), progress))
        finally:
            theirs.close()
            os.close(progress)
        self.link: Link[FromWorker] = Link(ours, from_worker, "a data worker")
        self._seen = (0, time.monotonic())

    @property
    def pid(self) -> int | None:
        """The process, once it is there."""
        return self._nursery.pids.get(self._number)

    @property
    def exists(self) -> bool:
        return self.pid is not None

    def ask(self, number: int, rows: Rows, hint: Any = None) -> None:
        """Send work; if the worker is gone, that will be seen where its end is."""
        if not self.asked:
            self._seen = (int(self._progress[BEATS]), time.monotonic())
        self.asked.append(number)
        packed = b"" if hint is None else pickle.dumps(hint)
        self._send(Load(number, np.ascontiguousarray(rows).tobytes(), rows.shape[1], packed))

    def answers(self) -> list[Answer]:
        """Return what it said since; slabs that nobody holds any more go back to it."""
        while self._freed:
            self._send(Free(self._freed.popleft()))
        try:
            self.link.flush()
            messages = self.link.receive()
        except PeerLost:
            self._lost_at = self._lost_at or time.monotonic()
            return []
        return [answer for message, fds in messages if (answer := self._understand(message, fds)) is not None]

    def _understand(self, message: FromWorker, fds: list[int]) -> Answer | None:
        match message:
            case Started():
                self.started = True
                self._seen = (self._seen[0], time.monotonic())
                return None
            case Failed():
                self.asked.remove(message.number)
                return Answer(message.number, error=message)
            case Loaded():
                self.asked.remove(message.number)
                if fds:
                    self._slabs[message.slab] = SlabReader(fds[0])
                size = sum(size for _, size in message.places)
                release = partial(_release, weakref.ref(self._freed), message.slab)
                content = self._slabs[message.slab].load(message.content, list(message.places), release)
                return Answer(message.number, size, content)

    def _send(self, message: object) -> None:
        try:
            self.link.send(message)
        except PeerLost:
            return

    def ended(self) -> WaitStatus | None:
        """How it ended, if it did: its template tells, or else its link."""
        if (status := self._nursery.ends.get(self._number)) is not None:
            return status
        if self._lost_at is None or time.monotonic() - self._lost_at < REPORT_S:
            return None
        return WaitStatus()

    @property
    def listens(self) -> bool:
        return self._lost_at is None

    def silent_s(self, now: float) -> float:
        """How long it has had work without any progress; what is not there yet is not late."""
        beats = int(self._progress[BEATS])
        if not self.asked or not self.started or beats != self._seen[0]:
            self._seen = (beats, now)
        return now - self._seen[1]

    def working_on(self) -> tuple[int, int]:
        """The number of the ticket that it works on, and which of its samples."""
        return int(self._progress[TICKET]), int(self._progress[SAMPLE])

    def kill(self) -> None:
        """End it at once; its template reaps it."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Let go of everything; the worker ends when it sees that."""
        self.link.close()
        for slab in self._slabs.values():
            slab.close()
        self._slabs.clear()


def _release(freed: "weakref.ref[deque[int]]", slab: int) -> None:
    """Note a slab that nobody holds any more; called whenever the last array dies, so it does nothing else."""
    if (queue := freed()) is not None:
        queue.append(slab)
