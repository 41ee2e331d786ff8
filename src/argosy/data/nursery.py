"""Where a loader's workers come from: a template process, started anew if it dies.

Under `argosy run` the rank's zygote forks it, which has the packages imported already; else, and whenever that
fails, it is executed.
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
from argosy.data.messages import Born, Broken, Ended, Fork, Forked, FromTemplate, Ready, from_template
from argosy.data.parcel import pack_parcel
from argosy.fabric import Link, here

WARM_S = 10.0
"""How long the zygote may take to fork a template, before one is executed instead."""
END_S = 10.0
ENTRY = "argosy.data.template:begin"


class Nursery:
    """The template, and what it told of its workers."""

    def __init__(self, parcel: int, tries: int) -> None:
        self._parcel, self._tries = parcel, tries
        self._starts_failed = 0
        self.warm = True
        """Whether the template is, or is to be, the zygote's child."""
        self.pids: dict[int, int] = {}
        self.ends: dict[int, WaitStatus] = {}
        self._life, self._held = os.pipe()
        """Nothing is ever written: the template and all workers end when the other end is gone."""
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
        self.link: Link[FromTemplate] = Link(ours, from_template, "the workers' template")

    def _ask_zygote(self, link: int) -> bool:
        around = pack_parcel((_environment(), sys.path, os.getcwd()))
        try:
            return here().fork(ENTRY, (link, self._parcel, self._life, around))
        finally:
            os.close(around)

    def _execute(self, link: int) -> subprocess.Popen[bytes]:
        fds = (link, self._parcel, self._life)
        words = [sys.executable, "-P", "-m", "argosy.data.template", *map(str, fds)]
        return subprocess.Popen(words, stdin=subprocess.DEVNULL, pass_fds=fds, env=_environment())

    def fork(self, number: int, fds: Sequence[int]) -> None:
        """Ask for a worker with these descriptors; it may be there later."""
        try:
            self.link.send(Fork(number), fds)
        except PeerLost:
            return  # Seen by `hear`, which tells that all workers not there yet are to be asked again.

    def hear(self) -> bool:
        """Take in what the template says; False if it died, and a new one was started.

        Raises:
            WorkerLost: the source cannot be loaded in another process, or templates die before they are ready.
        """
        try:
            self.link.flush()
            messages = self.link.receive()
            if self.warm and self._pidfd is None and not messages and time.monotonic() - self._asked_at > WARM_S:
                raise PeerLost("the zygote", f"no process came within {WARM_S:g} s")
        except PeerLost:
            self._restart()
            return False
        for message, fds in messages:
            match message:
                case Born():
                    self._pidfd = fds[0]
                case Ready():
                    self._ready, self._starts_failed = True, 0
                case Forked(number, pid):
                    self.pids[number] = pid
                case Ended(number, status):
                    self.ends[number] = WaitStatus.from_wait(status)
                case Broken(trace):
                    raise WorkerLost(
                        f"a worker process cannot load the source:\n{trace.rstrip()}",
                        hint="what it needs must be importable there; classes of the script itself are sent along",
                    )
        return True

    def _restart(self) -> None:
        never_came = self.warm and self._pidfd is None
        status = self.kill()
        self.link.close()
        if never_came:  # There is no zygote (any more).
            self.warm = False
        elif not self._ready:
            self._starts_failed += 1
        if self._starts_failed >= self._tries:
            raise WorkerLost(
                f"worker processes do not start: {self._tries} ended while they loaded the source: {status}"
            )
        self._start()

    def kill(self) -> WaitStatus:
        """End the template; returns how it had ended or ends, as far as that can be known."""
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
        self._let_go()
        return status

    def close(self, *, end: bool) -> None:
        """Let go of the template, and see it ended if `end`."""
        self.link.close()
        os.close(self._held)
        os.close(self._life)
        if end:
            self.kill()
        elif self._process is not None:
            self._process.returncode = 0  # Somebody else's child: not to be waited for.
        self._let_go()

    def _let_go(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


def _environment() -> dict[str, str]:
    """Workers import what this process can import, and use one core each."""
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
