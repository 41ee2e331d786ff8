"""The agent's link to its warden, which executes processes and holds descriptors for the next agent."""

import os
import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from argosy.core import ArgosyError, PeerLost
from argosy.fabric import Link, connect
from argosy.supervise.background_jobs import BackgroundJobs
from argosy.supervise.daemons import start_warden
from argosy.supervise.lifeline import Lifeline
from argosy.supervise.messages import Attach, Attached, Child, ChildReport, Drop, FromWarden, Hold, from_warden

FIND_S = 30.0
AGAIN_S = 2.0
"""After so long without an answer the warden that was to come was killed too."""


@dataclass(slots=True)
class Attachment:
    """A warden that has taken us as its agent: its link, and what an earlier agent left."""

    link: Link[FromWarden]
    pid: int = 0
    shelf: dict[str, int] = field(default_factory=dict[str, int])
    children: list[Child] = field(default_factory=list[Child])


def find_warden(runtime: Path) -> Attachment:
    """Attach to the warden of a runtime directory; one that does not come is started again.

    Raises:
        PeerLost: there is none.
    """
    deadline, started_at = time.monotonic() + FIND_S, time.monotonic()
    while True:
        try:
            return _attach(connect(runtime / "warden.sock", from_warden, "the warden"))
        except PeerLost:  # None is there yet, or this one is being killed.
            if time.monotonic() > deadline:
                raise
            if time.monotonic() - started_at > AGAIN_S:
                started_at = time.monotonic()
                start_warden(runtime, os.getpid())
            time.sleep(0.01)


def _attach(link: Link[FromWarden]) -> Attachment:
    link.send(Attach())
    found = Attachment(link)
    while True:
        attached, fds = link.wait(10.0)
        assert isinstance(attached, Attached)
        if not attached.pid:
            return found
        found.pid = attached.pid
        found.shelf.update(zip(attached.shelf, fds, strict=True))
        found.children += attached.children


class WardenLink:
    """Keeps a warden: one that was killed is replaced, and gets what the one before held."""

    def __init__(self, runtime: Path, selector: selectors.BaseSelector, jobs: BackgroundJobs) -> None:
        self.runtime, self._selector, self._jobs = runtime, selector, jobs
        self._lifeline = Lifeline(runtime)
        self._link: Link[FromWarden] | None = None
        self._held: dict[str, int] = {}
        """Copies of what the warden holds, for the next one."""
        self.pid = 0
        self.hear: Callable[[ChildReport], None] = lambda _: None
        self.lost: Callable[[], None] = lambda: None
        """Called when the warden was killed."""
        self.came: Callable[[], None] = lambda: None
        """Called when there is a new warden."""
        found = find_warden(runtime)
        self.shelf = found.shelf
        """What an earlier agent left, until somebody takes it."""
        self.inherited = found.children
        self._attached(found)

    @property
    def is_there(self) -> bool:
        return self._link is not None

    def send(self, message: object, fds: list[int]) -> None:
        """Send to the warden. If it was killed, who wants something of it asks again when the next one came."""
        if self._link is not None:
            try:
                self._link.send(message, fds)
            except PeerLost:
                self._replace()

    def hold(self, name: str, fd: int) -> None:
        """Let the warden keep a descriptor for the next agent."""
        self._forget(name)
        self._held[name] = os.dup(fd)
        self.send(Hold(name), [fd])

    def drop(self, name: str) -> None:
        """Nobody needs what the warden holds under this name any more."""
        self._forget(name)
        self.send(Drop(name), [])

    def clear_shelf(self) -> None:
        """Drop what nobody took: it is of runs that were never accepted, or are over."""
        for name, fd in self.shelf.items():
            os.close(fd)
            self.drop(name)
        self.shelf = {}

    def turn(self) -> None:
        """Send what is to be sent, and hear messages that have come."""
        if self._link is not None and (self._link.wants_write or self._link.has_messages):
            self._serve()

    @property
    def wants_write(self) -> bool:
        return self._link is not None and self._link.wants_write

    def _forget(self, name: str) -> None:
        if (fd := self._held.pop(name, None)) is not None:
            os.close(fd)

    def _attached(self, found: Attachment) -> None:
        self._link, self.pid = found.link, found.pid
        self._selector.register(found.link, selectors.EVENT_READ, self._serve)

    def _serve(self) -> None:
        if (link := self._link) is None:
            return
        try:
            link.flush()
            messages = link.receive()
        except ArgosyError:
            self._replace()
            return
        for message, _ in messages:
            if not isinstance(message, Attached):
                self.hear(message)

    def _replace(self) -> None:
        """The warden was killed: start another."""
        if (link := self._link) is None:
            return
        self._link = None
        self._selector.unregister(link)
        link.close()
        if self._lifeline.replaced:
            raise SystemExit(0)
        self.lost()
        start_warden(self.runtime, os.getpid())
        self._jobs.do("finding the warden", lambda: find_warden(self.runtime), self._replaced)

    def _replaced(self, found: Attachment | Exception) -> None:
        if isinstance(found, Exception):
            raise found
        self._attached(found)
        for name, fd in list(self._held.items()):
            self.send(Hold(name), [fd])
        self.came()
