"""`breakpoint()` in a rank: pdb waits on a Unix socket in the run's private directory for `argosy debug`.

No port is opened; the other end must belong to the same user. A terminal of its own (a pty) edits the lines.

P1  Whoever disconnects lets the rank continue, as `continue` does.
P2  While a rank waits or is looked at, its page says so: nobody's silence counts as a hang.
"""

import inspect
import os
import pdb
import pty
import select
import socket
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import Any

from argosy.fabric import peer_credentials
from argosy.observe import Flag, Page

END_OF_INPUT = b"\x04\x04"
"""What a terminal sends for the end of its input: after a line that was begun it takes two."""


def take_breakpoints(path: str, name: str, page: Page | None) -> None:
    """Let `breakpoint()` wait for `argosy debug`, unless this process has a terminal, or the user chose a debugger."""
    original = sys.breakpointhook
    if os.isatty(0) or "PYTHONBREAKPOINT" in os.environ:
        return
    debugger: list[_SocketPdb] = []

    def hook(*args: Any, **kwargs: Any) -> None:
        if os.getpid() != owner:  # In a forked worker.
            return original(*args, **kwargs)
        if not debugger:
            debugger.append(_SocketPdb(path, name, page))
        return debugger[0].set_trace(frame.f_back if (frame := inspect.currentframe()) is not None else None)

    owner = os.getpid()
    sys.breakpointhook = hook


class _SocketPdb(pdb.Pdb):
    """A debugger that waits for a client whenever it stops and has none."""

    def __init__(self, path: str, name: str, page: Page | None) -> None:
        self._path, self._name, self._page = path, name, page
        self._session: _Session | None = None
        self._leaving = False
        super().__init__(nosigint=True)
        self.use_rawinput = False

    def interaction(self, frame: FrameType | None, *args: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self._session is None:
            self._open(frame)
        super().interaction(frame, *args)
        if self._leaving:
            self._close()

    def _open(self, frame: FrameType | None) -> None:
        if self._page is not None:
            self._page.set_flag(Flag.BREAKPOINT)  # P2
        where = f" at {frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""
        print(f"argosy: {self._name} waits{where}", file=sys.stderr, flush=True)
        self._session = _Session(self._path)
        self.stdin, self.stdout = self._session.reads, self._session.writes

    def _close(self) -> None:
        self._leaving = False
        if self._session is not None:
            self._session.close()
            self._session = None
        if self._page is not None:
            self._page.clear_flag(Flag.BREAKPOINT)

    def set_continue(self) -> None:
        self._leaving = True
        super().set_continue()

    def set_quit(self) -> None:
        self._leaving = True
        super().set_quit()

    def do_EOF(self, arg: str) -> bool | None:
        return self.do_continue(arg)  # P1


class _Session:
    """One client, and the terminal between it and pdb."""

    def __init__(self, path: str) -> None:
        self._client = _accept(path)
        self._master, slave = pty.openpty()
        self.reads, self.writes = os.fdopen(os.dup(slave)), os.fdopen(slave, "w", buffering=1)
        self._closing, self._wake = os.pipe()
        self._relay = threading.Thread(target=self._run, name="argosy-debug", daemon=True)
        self._relay.start()

    def close(self) -> None:
        """Let the client read what was written, and hang up."""
        with suppress(OSError):
            self.writes.flush()
            os.write(self._wake, b"x")
        self._relay.join(5.0)
        for each in (self.reads, self.writes, self._client):
            with suppress(OSError):
                each.close()
        for fd in (self._master, self._closing, self._wake):
            os.close(fd)

    def _run(self) -> None:
        sources = [self._client.fileno(), self._master, self._closing]
        with suppress(OSError):
            while True:
                ready = select.select(sources, [], [])[0]
                if self._master in ready:
                    with suppress(BrokenPipeError):
                        self._client.sendall(os.read(self._master, 65536))
                elif self._closing in ready:
                    return
                elif not (data := self._client.recv(65536)):
                    os.write(self._master, END_OF_INPUT)
                    sources.remove(self._client.fileno())
                else:
                    os.write(self._master, data)


def _accept(path: str) -> socket.socket:
    """Wait for a client of the same user. However long the path is, the socket is reached by its directory."""
    folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            with suppress(FileNotFoundError):
                os.unlink(path)
            listener.bind(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
            os.chmod(path, 0o600)
            listener.listen(1)
            while True:
                client, _ = listener.accept()
                if peer_credentials(client)[1] == os.getuid():
                    return client
                client.close()
    finally:
        with suppress(OSError):
            os.unlink(path)
        os.close(folder)
