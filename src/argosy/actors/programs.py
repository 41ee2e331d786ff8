"""Foreign programs and services beside a mesh: runs of their own, with the same supervision, logs and lease."""

import contextlib
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from argosy.actors.events import Events
from argosy.actors.launching import GRACE_S, Wanted, start
from argosy.actors.lease import Watcher
from argosy.actors.readiness import Readiness, Tcp
from argosy.core import ArgosyError, ConfigError, DeadlinePassed, PeerLost
from argosy.supervise import SignalRun, Welcome, ask, connect_agent, write_atomically

SERVICES = "services"
_STRIKES = 3
"""Failed health checks in a row after which a service is killed, so that its restart policy decides."""


class Found(msgspec.Struct, frozen=True):
    """A service as others find it: its run, and its port if its readiness is one."""

    name: str
    run: str
    host: str = ""
    port: int = 0


class Program:
    """A program on the ranks of a mesh, owned by this process."""

    def __init__(self, wanted: Wanted, show: bool) -> None:
        link, self._welcome = start(wanted)
        self._watcher = Watcher(link, self._welcome, show)

    @property
    def name(self) -> str:
        """The run's name: what `argosy ps`, `logs` and `why` know it by."""
        return Path(self._welcome.directory).name

    @property
    def events(self) -> Events:
        """What happens to its processes."""
        return self._watcher.events

    @property
    def welcome(self) -> Welcome:
        return self._welcome

    @property
    def watcher(self) -> Watcher:
        return self._watcher

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for its end; returns the exit code, of the first failure if there was one.

        Raises:
            DeadlinePassed: it still runs; it is not stopped.
        """
        if not self._watcher.ended.wait(timeout_s):
            raise DeadlinePassed(f"the end of {self.name}", timeout_s or 0.0, hint="it goes on")
        return 1 if self._watcher.code is None else self._watcher.code

    def stop(self) -> None:
        """End it and wait for that."""
        self._watcher.stop("its owner", GRACE_S)


class Service:
    """A long-lived program that others use once it is ready."""

    def __init__(self, name: str, program: Program, ready: Readiness, health_s: float | None) -> None:
        self.name, self.ready = name, ready
        self._program = program
        self._health_s = health_s
        self._stopped = threading.Event()

    @property
    def run(self) -> str:
        """The name of its run, for `argosy logs` and `why`."""
        return self._program.name

    @property
    def events(self) -> Events:
        """What happens to its process."""
        return self._program.events

    def is_ready(self) -> bool:
        """Whether its readiness is met now."""
        return self.ready.is_met(Path(self._program.welcome.logs))

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Wait until it is ready.

        Raises:
            PeerLost: it ended instead.
            DeadlinePassed: it is not ready within `timeout_s`.
        """
        deadline, pause_s = time.monotonic() + timeout_s, 0.005
        while not self.is_ready():
            if self._program.watcher.ended.is_set():
                last = self.events.last()
                raise PeerLost(
                    f"service {self.name}", last.cause if last else "it ended", hint=f"argosy why {self.run}"
                )
            if time.monotonic() > deadline:
                raise DeadlinePassed(f"service {self.name} to be ready", timeout_s, hint=f"argosy logs {self.run}")
            time.sleep(pause_s)
            pause_s = min(0.1, pause_s * 1.5)
        if self._health_s is not None:
            threading.Thread(target=self._check, name=f"argosy health {self.name}", daemon=True).start()

    def stop(self) -> None:
        """End it and wait for that."""
        self._stopped.set()
        self._program.stop()

    def found(self) -> Found:
        """What others need to use it."""
        if isinstance(self.ready, Tcp):
            return Found(self.name, self.run, self.ready.host, self.ready.port)
        return Found(self.name, self.run)

    def _check(self) -> None:
        strikes, pid = 0, 0
        assert self._health_s is not None
        while not self._stopped.wait(self._health_s) and not self._program.watcher.ended.is_set():
            newest = self.events.newest(0)
            if newest != pid:  # Another process: it may take its time to become ready.
                strikes, pid = -10, newest
            strikes = 0 if self.is_ready() else strikes + 1
            if strikes >= _STRIKES:
                strikes = 0
                with contextlib.suppress(ArgosyError):
                    link = connect_agent()
                    try:
                        ask(link, SignalRun(self._program.welcome.run, 9))
                    finally:
                        link.close()


def publish(folder: Path, found: Found) -> None:
    """Let others of the run find a service by its name."""
    (folder / SERVICES).mkdir(exist_ok=True)
    write_atomically(folder / SERVICES / found.name, msgspec.json.encode(found))


def find(folder: Path, name: str, timeout_s: float) -> Found:
    """A service of the run, as soon as it is ready.

    Raises:
        DeadlinePassed: there is none of that name within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            return msgspec.json.decode((folder / SERVICES / name).read_bytes(), type=Found)
        if time.monotonic() > deadline:
            raise DeadlinePassed(f"a service named {name!r}", timeout_s)
        time.sleep(0.01)


def check_name(name: str) -> str:
    if not name or "/" in name or name.startswith("."):
        raise ConfigError(f"not a name for a service: {name!r}")
    return name


def program_of(name: str, argv: Sequence[str], wanted: Wanted, show: bool) -> Program:
    """Start a program under a run's name."""
    if not argv:
        raise ConfigError("a program needs at least its own name: []")
    return Program(msgspec.structs.replace(wanted, name=name, argv=argv), show)
