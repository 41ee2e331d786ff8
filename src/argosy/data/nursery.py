"""Where a loader's workers come from: a template process, started anew if it dies."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence

from argosy.core import PeerLost, WaitStatus
from argosy.data.errors import WorkerLost
from argosy.data.messages import Broken, Ended, Fork, Forked, FromTemplate, Ready, from_template
from argosy.fabric import Link


class Nursery:
    """The template, and what it told of its workers."""

    def __init__(self, parcel: int, tries: int) -> None:
        self._parcel, self._tries = parcel, tries
        self._starts_failed = 0
        self._ready = False
        self.pids: dict[int, int] = {}
        self.ends: dict[int, WaitStatus] = {}
        self._start()

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        fds = (theirs.fileno(), self._parcel)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "argosy.data.template", *map(str, fds)],
                stdin=subprocess.DEVNULL,
                pass_fds=fds,
                env=_environment(),
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.link: Link[FromTemplate] = Link(ours, from_template, "the workers' template")

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
        except PeerLost:
            self._restart()
            return False
        for message, _ in messages:
            match message:
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
        self.link.close()
        self._process.kill()
        code = self._process.wait()
        self._starts_failed += 0 if self._ready else 1
        self._ready = False
        if self._starts_failed >= self._tries:
            how = WaitStatus(signal=-code) if code < 0 else WaitStatus(code=code)
            raise WorkerLost(f"worker processes do not start: {self._tries} ended while they loaded the source: {how}")
        self._start()

    def close(self, *, end: bool) -> None:
        """Let go of the template, and see it ended if `end`."""
        self.link.close()
        if not end:
            self._process.returncode = 0  # Somebody else's child: not to be waited for.
            return
        self._process.kill()
        self._process.wait()


def _environment() -> dict[str, str]:
    """Workers import what this process can import, and use one core each."""
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
