"""How an agent finds its warden, and takes over what that kept for it."""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from argosy.core import PeerLost
from argosy.fabric import Link, connect
from argosy.supervise.daemons import start_warden
from argosy.supervise.messages import Attach, Attached, Child, FromWarden, from_warden

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
