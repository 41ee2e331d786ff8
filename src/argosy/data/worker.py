"""A worker process of a loader: rows in, microbatches out; it holds nothing that is missed when it dies.

W1  It ends when its loader does, even while a sample is being made.
"""

import contextlib
import fcntl
import mmap
import os
import pickle
import select
import signal
import socket
import sys
import time
import traceback
from collections import deque
from typing import Any, cast

import numpy as np
import setproctitle

from argosy.core import DeadlinePassed, PeerLost
from argosy.data.errors import SampleError
from argosy.data.fill import Recipe, fill
from argosy.data.messages import (
    BEATS,
    CONTENT_BYTES_MAX,
    IDLE,
    PROGRESS_BYTES,
    SAMPLE,
    TICKET,
    Failed,
    Free,
    Load,
    Loaded,
    Started,
    ToWorker,
    to_worker,
)
from argosy.data.parcel import open_parcel
from argosy.data.pool import keep_heap
from argosy.data.slab import SlabWriter
from argosy.fabric import Link

WAIT_S = 3600.0
_F_SETSIG = 10


class Worker:
    """The loop's state."""

    def __init__(self, link: Link[ToWorker], recipe: Recipe, progress: mmap.mmap) -> None:
        self._link, self._recipe = link, recipe
        self._progress = np.frombuffer(progress, np.int64)
        self._slabs: list[SlabWriter] = []
        self._free: list[int] = []
        self._sent: set[int] = set()
        self._todo: deque[Load] = deque()

    def loop(self) -> None:
        """Serve until the loader is gone."""
        while True:
            while not self._todo:
                with contextlib.suppress(DeadlinePassed):
                    self._take(self._link.wait(WAIT_S)[0])
            self._work(self._todo.popleft())
            for message, _ in self._link.receive():
                self._take(message)

    def _take(self, message: ToWorker) -> None:
        match message:
            case Load():
                self._todo.append(message)
            case Free(slab):
                self._free.append(slab)

    def _work(self, load: Load) -> None:
        rows = np.frombuffer(load.rows, np.int64).reshape(-1, load.width)
        number = self._free.pop() if self._free else len(self._slabs)
        if number == len(self._slabs):
            self._slabs.append(SlabWriter())
        slab = self._slabs[number]
        slab.reset()
        self._progress[TICKET] = load.number
        began = time.perf_counter()
        try:
            hint = pickle.loads(load.hint) if load.hint else None
            filled = fill(self._recipe, rows, slab.empty, self._at, hint)
            content, places = slab.dump((filled.batch, filled.skipped, filled.extra))
        except BaseException as error:  # Also SystemExit and the like: the training must hear of it.
            self._free.append(number)
            trace = traceback.format_exc()
            if not isinstance(error, Exception):
                where = self._recipe.reader.where(rows, self._progress[SAMPLE])
                error = SampleError(where, f"{type(error).__name__}: {error}")
            self._send(Failed(load.number, portable(error, trace), trace))
            return
        finally:
            self._progress[TICKET] = IDLE
            self._progress[BEATS] += 1
        if len(content) > CONTENT_BYTES_MAX:
            places.append(slab.write(content))
            content = b""
        fresh = number not in self._sent
        self._sent.add(number)
        loaded = Loaded(load.number, number, content, places, time.perf_counter() - began)
        self._send(loaded, [slab.fd] if fresh else [])

    def _at(self, number: int) -> None:
        """A sample begins: the loader sees from outside which, and that there is progress."""
        self._progress[SAMPLE] = number
        self._progress[BEATS] += 1

    def _send(self, message: object, fds: list[int] | None = None) -> None:
        self._link.send(message, fds or [])
        while self._link.wants_write:
            poller = select.poll()
            poller.register(self._link, select.POLLOUT)
            poller.poll()
            self._link.flush()


def portable(error: Exception, trace: str) -> bytes:
    """Pickle the error and its cause, or what can be said of them."""
    for thing in ((error, error.__cause__), (error, None)):
        try:
            content = pickle.dumps(thing)
            pickle.loads(content)
        except Exception:
            continue
        return content
    where = error.where if isinstance(error, SampleError) else "a microbatch"
    cause = error.cause if isinstance(error, SampleError) else trace.strip().splitlines()[-1]
    return pickle.dumps((SampleError(where, cause), None))


def end_with(life: int) -> None:
    """Let the kernel end this process when the loader, which writes to the pipe `life`, is gone (W1).

    That needs no thread, and works whatever the process is doing. Each process opens the pipe for itself: who
    gets the signal belongs to what was opened.
    """
    mine = os.open(f"/proc/self/fd/{life}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.fcntl(mine, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(mine, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(mine, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
    poller = select.poll()
    poller.register(mine, 0)
    if poller.poll(0):  # It was gone before.
        os._exit(0)


def serve(link_fd: int, progress_fd: int, recipe: Recipe) -> None:
    """Be a worker until the loader is gone. Does not return."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the loader's to answer.
    setproctitle.setproctitle("argosy: data worker")
    link = Link(socket.socket(fileno=link_fd), to_worker, "the loader")
    progress = mmap.mmap(progress_fd, PROGRESS_BYTES)
    if (torch := cast(Any, sys.modules.get("torch"))) is not None:
        torch.set_num_threads(1)
    keep_heap()
    with contextlib.suppress(PeerLost):
        link.send(Started())
        Worker(link, recipe, progress).loop()
    os._exit(0)  # Destructors of a source may wait for threads that nobody will end.


def main() -> None:
    """Be a worker that loads the source itself; the arguments are descriptors."""
    link, source, life, progress = (int(word) for word in sys.argv[1:5])
    for fd in (link, source, life, progress):
        os.set_inheritable(fd, False)
    end_with(life)
    serve(link, progress, open_parcel(source))


if __name__ == "__main__":
    main()
