"""One thread per process that sees peers die: it holds their pidfds, reads their links, and tells who asked."""

import os
import select
import threading
from collections.abc import Callable
from contextlib import suppress

from argosy._select import native
from argosy.core import WaitStatus

Told = Callable[[str], None]


class Watcher:
    """Calls back, once and from its own thread, when a watched process has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._poll = select.epoll()
        self._watched: dict[int, tuple[int, dict[int, Told]]] = {}
        self._pidfds: dict[int, int] = {}
        self._attended: dict[int, Callable[[], bool]] = {}
        self._next = 0
        threading.Thread(target=self._run, name="argosy-watcher", daemon=True).start()

    def watch(self, pid: int, told: Told) -> int:
        """Tell when `pid` ends, or at once if it has. Returns what `forget` takes."""
        with self._lock:
            self._next += 1
            ticket = self._next
            known = self._pidfds.get(pid)
            if known is not None:
                self._watched[known][1][ticket] = told
                return ticket
            try:
                pidfd = os.pidfd_open(pid)
            except ProcessLookupError:
                pidfd = -1
            else:
                self._pidfds[pid] = pidfd
                self._watched[pidfd] = (pid, {ticket: told})
                self._poll.register(pidfd, select.EPOLLIN)
        if pidfd < 0:
            told("its process is gone")
        return ticket

    def forget(self, ticket: int) -> None:
        """Tell nothing more to the one who got `ticket`."""
        with self._lock:
            for pidfd, (pid, askers) in list(self._watched.items()):
                if askers.pop(ticket, None) is not None and not askers:
                    self._drop(pidfd, pid)

    def attend(self, fd: int, ready: Callable[[], bool]) -> None:
        """Call `ready` whenever there is something to read, until it returns False."""
        with self._lock:
            self._attended[fd] = ready
            self._poll.register(fd, select.EPOLLIN)

    def neglect(self, fd: int, ready: Callable[[], bool]) -> None:
        """Attend to a descriptor no more, if it is still the one that `ready` reads; before it is closed."""
        with self._lock:
            if self._attended.get(fd) is ready:
                del self._attended[fd]
                with suppress(OSError):  # its owner closed it meanwhile: the kernel has forgotten it
                    self._poll.unregister(fd)

    def _drop(self, pidfd: int, pid: int) -> None:
        self._poll.unregister(pidfd)
        del self._watched[pidfd], self._pidfds[pid]
        os.close(pidfd)

    def _run(self) -> None:
        while True:
            for fd, _ in self._poll.poll():
                self._serve(fd)  # a frame of its own, which holds nobody that was told while this one waits

    def _serve(self, fd: int) -> None:
        ready = self._attended.get(fd)
        if ready is not None:
            if not ready():
                self.neglect(fd, ready)
            return
        with self._lock:
            if fd not in self._watched:
                return
            pid, askers = self._watched[fd]
            cause = how_it_ended(pid, fd)
            self._drop(fd, pid)
        for told in askers.values():
            told(cause)


def how_it_ended(pid: int, pidfd: int) -> str:
    """Say how the process ended: from its remains, or, if its parent has reaped it, from the kernel's memory."""
    status = None
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        if fields[0] in (b"Z", b"X"):
            os.readlink(f"/proc/{pid}/ns/user")  # who may not read this is told of an exit code 0, whatever it was
            status = int(fields[-1])
    except (OSError, IndexError, ValueError):
        status = None
    if status is None:
        try:
            status = native.pidfd_exit_status(pidfd)
        except OSError:
            status = None
    return "its process is gone" if status is None else str(WaitStatus.from_wait(status))


_watcher: Watcher | None = None
_watcher_pid = 0
_making = threading.Lock()


def watcher() -> Watcher:
    """The watcher of this process, started when first asked for; a forked child gets its own."""
    global _watcher, _watcher_pid
    with _making:
        if _watcher is None or _watcher_pid != os.getpid():
            _watcher, _watcher_pid = Watcher(), os.getpid()
        return _watcher
