"""Watching children: exits and stops, recorded before they are reaped and told."""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from argosy.core import RankId, WaitStatus
from argosy.supervise.messages import ORPHAN, Child, ChildExited, ChildPaused
from argosy.supervise.processes import process_id
from argosy.supervise.records.exits import ExitRecord, Exits


def _nothing(number: int, frame: FrameType | None) -> None:
    """A handler must exist for a signal to wake the loop."""


class Reaper:
    """Turns SIGCHLD into messages. `fileno` is readable when a child changed."""

    def __init__(self, runtime: Path, *, adopts: bool = False) -> None:
        self._adopts = adopts
        self.children: dict[int, Child] = {}
        self._exits = Exits(runtime)
        self._wake_in, self._wake_out = socket.socketpair()
        for end in (self._wake_in, self._wake_out):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, _nothing)
        signal.set_wakeup_fd(self._wake_out.fileno(), warn_on_full_buffer=False)

    def fileno(self) -> int:
        return self._wake_in.fileno()

    def forget(self) -> None:
        """In a forked child: these descriptors are not its own."""
        self._wake_in.detach()
        self._wake_out.detach()

    def find(self, run: str, rank: RankId) -> Child | None:
        """The living child that is this rank."""
        return next((child for child in self.children.values() if child.rank == rank and child.run == run), None)

    def collect(self) -> Iterator[ChildExited | ChildPaused]:
        """Yield what happened since the last call.

        Of strangers too if this reaper adopts (the parent of a rank may have been killed); else in silence.
        """
        with contextlib.suppress(BlockingIOError):
            while self._wake_in.recv(4096):
                pass
        while True:
            try:
                seen = os.waitid(os.P_ALL, 0, os.WEXITED | os.WSTOPPED | os.WCONTINUED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if seen is None:
                return
            child = self.children.get(seen.si_pid) or self._orphan(seen.si_pid)
            if seen.si_code in (os.CLD_STOPPED, os.CLD_TRAPPED, os.CLD_CONTINUED):
                os.waitid(os.P_PID, seen.si_pid, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
                if child is not None:
                    yield ChildPaused(child, 0 if seen.si_code == os.CLD_CONTINUED else seen.si_status)
                continue
            status = (
                WaitStatus(code=seen.si_status) if seen.si_code == os.CLD_EXITED else WaitStatus(signal=seen.si_status)
            )
            if child is not None:
                self._exits.append(ExitRecord(child, status, time.time()))
            _, _, usage = os.wait4(seen.si_pid, 0)
            if child is not None:
                self.children.pop(seen.si_pid, None)
                yield ChildExited(child, status, usage.ru_maxrss * 1024, usage.ru_utime + usage.ru_stime)

    def _orphan(self, pid: int) -> Child | None:
        """Whose parent was killed: only its pid and start time are known here, and they suffice."""
        return Child("", RankId("orphan", 0), process_id(pid), ORPHAN) if self._adopts else None
