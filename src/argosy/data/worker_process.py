"""A worker process of a loader: receives rows, sends microbatches, and has no state that matters.

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
import traceback
from collections import deque
from typing import Any, cast

import numpy as np
import setproctitle

from argosy.core import DeadlinePassed, PeerLost
from argosy.data.array_pool import keep_heap
from argosy.data.errors import SampleError
from argosy.data.microbatch import MicrobatchRecipe, make_microbatch
from argosy.data.pickled_source import unpickle_shared
from argosy.data.slab import SlabWriter
from argosy.data.worker_messages import (
    BEATS,
    CONTENT_BYTES_MAX,
    IDLE,
    PROGRESS_BYTES,
    REQUEST,
    SAMPLE,
    FreeSlab,
    Load,
    Loaded,
    LoadFailed,
    ToWorker,
    WorkerStarted,
    to_worker,
)
from argosy.fabric import Link

WAIT_S = 3600.0
_F_SETSIG = 10


class Worker:
    """The state of the loop."""

    def __init__(self, link: Link[ToWorker], recipe: MicrobatchRecipe, progress: mmap.mmap) -> None:
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
            case FreeSlab(slab):
                self._free.append(slab)

    def _work(self, load: Load) -> None:
        rows = np.frombuffer(load.rows, np.int64).reshape(-1, load.width)
        number = self._free.pop() if self._free else len(self._slabs)
        if number == len(self._slabs):
            self._slabs.append(SlabWriter())
        slab = self._slabs[number]
        slab.reset()
        self._progress[REQUEST] = load.number
        try:
            hint = pickle.loads(load.hint) if load.hint else None
            made = make_microbatch(self._recipe, rows, slab.empty, self._at, hint)
            content, places = slab.dump((made.batch, made.skipped, made.extra))
        except BaseException as error:  # SystemExit, too, is reported to the training.
            self._free.append(number)
            trace = traceback.format_exc()
            if not isinstance(error, Exception):
                where = self._recipe.reader.where(rows, self._progress[SAMPLE])
                error = SampleError(where, f"{type(error).__name__}: {error}")
            self._send(LoadFailed(load.number, portable(error, trace), trace))
            return
        finally:
            self._progress[REQUEST] = IDLE
            self._progress[BEATS] += 1
        if len(content) > CONTENT_BYTES_MAX:
            places.append(slab.write(content))
            content = b""
        fresh = number not in self._sent
        self._sent.add(number)
        self._send(Loaded(load.number, number, content, places), [slab.fd] if fresh else [])

    def _at(self, number: int) -> None:
        """Record that a sample begins, where the loader can read it."""
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
    """Pickle the error and its cause, or, if they cannot be pickled, a SampleError with their text."""
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
    """Let the kernel kill this process when the loader, which holds the writing end of the pipe `life`, is gone (W1).

    That needs no thread, and works whatever the process is doing. Each process opens the pipe again, because the
    receiver of the signal is a property of the open file.
    """
    mine = os.open(f"/proc/self/fd/{life}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.fcntl(mine, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(mine, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(mine, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
    poller = select.poll()
    poller.register(mine, 0)
    if poller.poll(0):  # The loader is gone already.
        os._exit(0)


def serve(link_fd: int, progress_fd: int, recipe: MicrobatchRecipe) -> None:
    """Run as a worker until the loader is gone. Does not return."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The loader handles Ctrl-C.
    setproctitle.setproctitle("argosy: data worker")
    link = Link(socket.socket(fileno=link_fd), to_worker, "the loader")
    progress = mmap.mmap(progress_fd, PROGRESS_BYTES)
    if (torch := cast(Any, sys.modules.get("torch"))) is not None:
        torch.set_num_threads(1)
    keep_heap()
    with contextlib.suppress(PeerLost):
        link.send(WorkerStarted())
        Worker(link, recipe, progress).loop()
    os._exit(0)  # Without destructors: those of a source may wait for threads that never end.


def main() -> None:
    """Run as an executed worker, which loads the source itself; the arguments are descriptors."""
    link, source, life, progress = (int(word) for word in sys.argv[1:5])
    for fd in (link, source, life, progress):
        os.set_inheritable(fd, False)
    end_with(life)
    serve(link, progress, unpickle_shared(source))


if __name__ == "__main__":
    main()
