"""The template process of a loader: it loads the source, and forks a worker on request.

    python -m argosy.data.template_process LINK SOURCE LIFE    (descriptors)

or forked by a rank's zygote, which calls `begin`. So packages are imported once for all workers, the workers share
memory, and a replacement starts in milliseconds.

T1  It forks workers only while it has one thread; if the source started others, workers are executed instead.
T2  It ends with its loader, even while the source is being loaded. So do workers, which do not depend on it.
"""

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import traceback
from typing import Any

import setproctitle

from argosy.core import PeerLost
from argosy.data.pickled_source import unpickle_shared
from argosy.data.worker_messages import (
    ForkWorker,
    SourceBroken,
    TemplateReady,
    TemplateStarted,
    ToTemplate,
    WorkerEnded,
    WorkerForked,
    to_template,
)
from argosy.data.worker_process import end_with, serve
from argosy.fabric import Link

_POLL_S = 60.0


class TemplateProcess:
    """The state of the loop."""

    def __init__(self, link: Link[ToTemplate], source: int, life: int, recipe: Any) -> None:
        self._link, self._source, self._life, self._recipe = link, source, life, recipe
        self._children: dict[int, tuple[int, int]] = {}
        """Number and pid of each worker, by its pidfd."""

    def loop(self) -> None:
        """Serve until the loader is gone."""
        while True:
            poller = select.poll()
            poller.register(self._link, select.POLLIN | (select.POLLOUT if self._link.wants_write else 0))
            for pidfd in self._children:
                poller.register(pidfd, select.POLLIN)
            poller.poll(_POLL_S * 1000)
            self._link.flush()
            for message, fds in self._link.receive():
                self._fork(message, fds)
            self._reap()

    def _fork(self, message: ForkWorker, fds: list[int]) -> None:
        alone = len(os.listdir("/proc/self/task")) == 1
        pid = os.fork()
        if pid == 0:
            try:
                self._become_worker(fds[0], fds[1], alone)
            finally:
                os._exit(1)
        for fd in fds:
            os.close(fd)
        self._children[os.pidfd_open(pid)] = (message.number, pid)
        self._link.send(WorkerForked(message.number, pid))

    def _become_worker(self, link: int, progress: int, alone: bool) -> None:
        if not alone:  # T1
            fds = (link, self._source, self._life, progress)
            for fd in fds:
                os.set_inheritable(fd, True)
            os.execv(sys.executable, [sys.executable, "-P", "-m", "argosy.data.worker_process", *map(str, fds)])
        end_with(self._life)
        for pidfd in self._children:
            os.close(pidfd)
        os.close(self._link.fileno())
        self._link.forget()
        serve(link, progress, self._recipe)

    def _reap(self) -> None:
        for pidfd, (number, pid) in list(self._children.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._children[pidfd]
                os.close(pidfd)
                self._link.send(WorkerEnded(number, status))


def main() -> None:
    """Run as an executed template; the arguments are descriptors."""
    link, source, life = (int(word) for word in sys.argv[1:4])
    for fd in (link, source, life):
        os.set_inheritable(fd, False)
    serve_template(link, source, life)


def begin(link: int, source: int, life: int, surroundings: int) -> None:
    """Run as a forked template: first take over the loader's environment, import path and directory."""
    variables, path, cwd = unpickle_shared(surroundings)
    os.close(surroundings)
    for name in set(os.environ) - set(variables):
        del os.environ[name]
    os.environ.update(variables)
    sys.path[:] = path
    importlib.invalidate_caches()  # The user may have added files since the zygote looked.
    os.chdir(cwd)
    serve_template(link, source, life)


def serve_template(link_fd: int, source: int, life: int) -> None:
    """Load the source and fork workers until the loader is gone. Does not return."""
    end_with(life)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The loader handles Ctrl-C.
    setproctitle.setproctitle("argosy: data worker template")
    link = Link(socket.socket(fileno=link_fd), to_template, "the loader")
    with contextlib.suppress(PeerLost):
        pidfd = os.pidfd_open(os.getpid())
        link.send(TemplateStarted(), [pidfd])
        os.close(pidfd)
        try:
            recipe = unpickle_shared(source)
        except BaseException:
            link.send(SourceBroken(traceback.format_exc()[-(1 << 16) :]))
            link.wait(_POLL_S)
            os._exit(1)
        gc.collect()
        gc.freeze()  # Pages stay shared: the collector would write to each of them.
        link.send(TemplateReady())
        TemplateProcess(link, source, life, recipe).loop()
    os._exit(0)


if __name__ == "__main__":
    main()
