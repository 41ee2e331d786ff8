"""The loader's side of the template process, which forks the workers: starts it, and replaces it if it dies.

Under `argosy run` the rank's zygote forks it, with the packages already imported. Elsewhere, or if that fails, it is
executed. The process itself is `template_process.py`.
"""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from argosy.core import PeerLost, WaitStatus
from argosy.data.errors import WorkerLost
from argosy.data.pickled_source import pickle_shared
from argosy.data.worker_messages import (
    ForkWorker,
    FromTemplate,
    SourceBroken,
    TemplateReady,
    TemplateStarted,
    WorkerEnded,
    WorkerForked,
    from_template,
)
from argosy.fabric import Link, here

WARM_S = 10.0
"""How long the zygote may take to fork a template; after that, one is executed."""
END_S = 10.0
ENTRY = "argosy.data.template_process:begin"


class WorkerTemplate:
    """The template process, and its reports about the workers."""

    def __init__(self, source_fd: int, tries: int) -> None:
        self._source_fd, self._tries = source_fd, tries
        self._starts_failed = 0
        self.warm = True
        """Whether the template is, or will be, forked by the zygote."""
        self.pids: dict[int, int] = {}
        self.ends: dict[int, WaitStatus] = {}
        self._life, self._held = os.pipe()
        """A pipe to which nothing is written: the template and all workers end when its writing end closes."""
        self._start()

    def _start(self) -> None:
        self._ready = False
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd: int | None = None
        self._asked_at = time.monotonic()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.warm = self.warm and self._ask_zygote(theirs.fileno())
            if not self.warm:
                self._process = self._execute(theirs.fileno())
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.link: Link[FromTemplate] = Link(ours, from_template, "the worker template")

    def _ask_zygote(self, link: int) -> bool:
        surroundings = pickle_shared((_environment(), sys.path, os.getcwd()))
        try:
            return here().fork(ENTRY, (link, self._source_fd, self._life, surroundings))
        finally:
            os.close(surroundings)

    def _execute(self, link: int) -> subprocess.Popen[bytes]:
        fds = (link, self._source_fd, self._life)
        command = [sys.executable, "-P", "-m", "argosy.data.template_process", *map(str, fds)]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds, env=_environment())

    def fork(self, number: int, fds: Sequence[int]) -> None:
        """Ask for a worker with these descriptors; it starts later."""
        try:
            self.link.send(ForkWorker(number), fds)
        except PeerLost:
            return  # `read_reports` notices; then the workers that have not started are asked for again.

    def read_reports(self) -> bool:
        """Read the template's messages; False if it died and was replaced.

        Raises:
            WorkerLost: the source cannot be loaded in another process, or templates die before they are ready.
        """
        try:
            self.link.flush()
            messages = self.link.receive()
            if self.warm and self._pidfd is None and not messages and time.monotonic() - self._asked_at > WARM_S:
                raise PeerLost("the zygote", f"it forked no process within {WARM_S:g} s")
        except PeerLost:
            self._restart()
            return False
        for message, fds in messages:
            match message:
                case TemplateStarted():
                    self._pidfd = fds[0]
                case TemplateReady():
                    self._ready, self._starts_failed = True, 0
                case WorkerForked(number, pid):
                    self.pids[number] = pid
                case WorkerEnded(number, status):
                    self.ends[number] = WaitStatus.from_wait(status)
                case SourceBroken(trace):
                    raise WorkerLost(
                        f"a worker process cannot load the source:\n{trace.rstrip()}",
                        hint="the modules that it needs must be importable there; classes of the script are sent along",
                    )
        return True

    def _restart(self) -> None:
        never_forked = self.warm and self._pidfd is None
        status = self.kill()
        self.link.close()
        if never_forked:  # There is no zygote.
            self.warm = False
        elif not self._ready:
            self._starts_failed += 1
        if self._starts_failed >= self._tries:
            raise WorkerLost(
                f"worker processes do not start: {self._tries} of them ended while loading the source: {status}"
            )
        self._start()

    def kill(self) -> WaitStatus:
        """End the template; returns how it ended, if that is known."""
        status = WaitStatus()
        if self._process is not None:
            self._process.kill()
            code = self._process.wait()
            status = WaitStatus(signal=-code) if code < 0 else WaitStatus(code=code)
        elif self._pidfd is not None:
            poller = select.poll()
            poller.register(self._pidfd, select.POLLIN)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
                poller.poll(END_S * 1000)
        self._close_pidfd()
        return status

    def close(self, *, end: bool) -> None:
        """Close the descriptors of the template, and kill it if `end`."""
        self.link.close()
        os.close(self._held)
        os.close(self._life)
        if end:
            self.kill()
        elif self._process is not None:
            self._process.returncode = 0  # The parent's child: Popen must not wait for it.
        self._close_pidfd()

    def _close_pidfd(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


def _environment() -> dict[str, str]:
    """Return the workers' environment: they import from the same path, and use one core each."""
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
