"""A thread that notices the death of peers: it polls their pidfds and links, and calls back."""

import os
import select
import threading
from collections.abc import Callable
from contextlib import suppress

from argosy._select import native
from argosy.core import WaitStatus

OnEnd = Callable[[str], None]


class PeerWatcher:
    """Calls back, once and on its own thread, when a watched process has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._poll = select.epoll()
        self._watched: dict[int, tuple[int, dict[int, OnEnd]]] = {}
        self._pidfds: dict[int, int] = {}
        self._watched_fds: dict[int, Callable[[], bool]] = {}
        self._next = 0
        threading.Thread(target=self._run, name="argosy-watcher", daemon=True).start()

    def watch(self, pid: int, on_end: OnEnd) -> int:
        """Call `on_end` when `pid` ends, or at once if it has. Returns the number for `forget`."""
        with self._lock:
            self._next += 1
            number = self._next
            known = self._pidfds.get(pid)
            if known is not None:
                self._watched[known][1][number] = on_end
                return number
            try:
                pidfd = os.pidfd_open(pid)
            except ProcessLookupError:
                pidfd = -1
            else:
                self._pidfds[pid] = pidfd
                self._watched[pidfd] = (pid, {number: on_end})
                self._poll.register(pidfd, select.EPOLLIN)
        if pidfd < 0:
            on_end("its process is gone")
        return number

    def forget(self, number: int) -> None:
        """Undo one `watch`."""
        with self._lock:
            for pidfd, (pid, callbacks) in list(self._watched.items()):
                if callbacks.pop(number, None) is not None and not callbacks:
                    self._drop(pidfd, pid)

    def watch_fd(self, fd: int, ready: Callable[[], bool]) -> None:
        """Call `ready` whenever `fd` is readable, until it returns False."""
        with self._lock:
            self._watched_fds[fd] = ready
            self._poll.register(fd, select.EPOLLIN)

    def unwatch_fd(self, fd: int, ready: Callable[[], bool]) -> None:
        """Stop watching `fd`, if it is still the descriptor that `ready` reads. Call it before closing `fd`."""
        with self._lock:
            if self._watched_fds.get(fd) is ready:
                del self._watched_fds[fd]
                with suppress(OSError):  # Its owner has closed it, which removes it from the poll.
                    self._poll.unregister(fd)

    def _drop(self, pidfd: int, pid: int) -> None:
        self._poll.unregister(pidfd)
        del self._watched[pidfd], self._pidfds[pid]
        os.close(pidfd)

    def _run(self) -> None:
        while True:
            for fd, _ in self._poll.poll():
                self._serve(fd)  # A frame of its own, so that this one keeps no reference while it waits.

    def _serve(self, fd: int) -> None:
        ready = self._watched_fds.get(fd)
        if ready is not None:
            if not ready():
                self.unwatch_fd(fd, ready)
            return
        with self._lock:
            if fd not in self._watched:
                return
            pid, callbacks = self._watched[fd]
            cause = how_it_ended(pid, fd)
            self._drop(fd, pid)
        for on_end in callbacks.values():
            on_end(cause)


def how_it_ended(pid: int, pidfd: int) -> str:
    """Say how a process ended: from /proc if it is a zombie, else from its pidfd."""
    status = None
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        if fields[0] in (b"Z", b"X"):
            os.readlink(f"/proc/{pid}/ns/user")  # Raises without permission: then the status would read as 0.
            status = int(fields[-1])
    except (OSError, IndexError, ValueError):
        pass
    if status is None:
        with suppress(OSError):
            status = native.pidfd_exit_status(pidfd)
    return "its process is gone" if status is None else str(WaitStatus.from_wait(status))


_watcher: PeerWatcher | None = None
_watcher_pid = 0
_making = threading.Lock()


def watcher() -> PeerWatcher:
    """Return the watcher of this process, started on first use; a forked child gets its own."""
    global _watcher, _watcher_pid
    with _making:
        if _watcher is None or _watcher_pid != os.getpid():
            _watcher, _watcher_pid = PeerWatcher(), os.getpid()
        return _watcher
