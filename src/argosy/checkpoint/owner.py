"""One run writes to a directory of checkpoints: the owner is in a file that only one can make."""

import gc
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Thread

import msgspec
import psutil

from argosy.checkpoint.format import NO_JSON
from argosy.checkpoint.stores import Store
from argosy.core import ConfigError

OWNER = "owner.json"
GRACE_S = 1.0
"""How long an owner may take to let go: a keeper whose last saver was closed tidies up first."""
SETTLE_S = 0.25
"""A process that found a dead owner deletes its record within this time."""
LEAVE_S = 600.0
"""How long a new saver waits for the saves of one that was dropped."""


@dataclass(slots=True)
class Claim:
    """A saver of this process, and the place that it writes to."""

    place: str
    site: str
    """Where it was made."""
    pid: int = field(default_factory=os.getpid)
    """A fork has its parent's claims too."""
    leaving: Thread | None = None
    """It was dropped without `close`, or closed too soon: this thread still hands over its saves."""


_here: dict[str, Claim] = {}


class Owner(msgspec.Struct, frozen=True):
    """Who writes here."""

    host: str
    pid: int
    started_at: float
    session: str


class DirectoryInUse(ConfigError):
    """Another living run writes to this directory."""


def claim(place: str, site: str) -> Claim:
    """Register a saver of this process for a place; waits until a dropped saver of that place has ended its saves.

    Raises:
        DirectoryInUse: another one does.
    """
    if _other(place) is not None:
        gc.collect()  # It may be garbage.
    if (other := _other(place)) is not None and other.leaving is not None:
        other.leaving.join(LEAVE_S)
        if not other.leaving.is_alive():
            disclaim(other)
    if (other := _other(place)) is not None:
        raise DirectoryInUse(
            f"a Saver of this process writes to {place} already: it was made at {other.site}",
            hint="use that one, or call its close() before; it lives as long as a name holds it, as in a notebook",
        )
    _here[place] = mine = Claim(place, site)
    return mine


def _other(place: str) -> Claim | None:
    found = _here.get(place)
    return found if found is not None and found.pid == os.getpid() else None


def disclaim(mine: Claim) -> None:
    """That saver is closed."""
    if _here.get(mine.place) is mine:
        del _here[mine.place]


def take(store: Store, session: str) -> Owner:
    """Become the owner of a place; a dead owner of this host is replaced.

    Raises:
        DirectoryInUse: the owner lives, or is on another host, where nobody here can look.
    """
    me = Owner(socket.gethostname(), os.getpid(), psutil.Process().create_time(), session)
    with store.alone(GRACE_S) as is_alone:
        return _take(store, me, is_alone=is_alone)


def _take(store: Store, me: Owner, *, is_alone: bool) -> Owner:
    deadline, has_deleted = time.monotonic() + GRACE_S, False
    crowded = DirectoryInUse(f"another run takes this directory at the same moment: {store.name}")
    while not store.put(OWNER, msgspec.json.encode(me), only_if_new=True):
        other = read(store)
        error = None if other is None else _if_alive(store, other, me)
        if time.monotonic() > deadline:
            raise error or crowded
        if error is not None:
            time.sleep(GRACE_S / 20)
            continue
        store.delete(OWNER)
        has_deleted = True
    if has_deleted and not is_alone:  # Others may have found the same dead owner, and delete this record for it.
        time.sleep(SETTLE_S)
        if read(store) != me:
            raise crowded
    return me


def _if_alive(store: Store, other: Owner, me: Owner) -> DirectoryInUse | None:
    """Why the directory cannot be had; None: its owner is gone, or this process."""
    if other.host != me.host:
        hint = f"if it is gone, remove {store.name}/{OWNER}"
        return DirectoryInUse(f"a run on {other.host} (pid {other.pid}) writes to {store.name}", hint=hint)
    if (other.pid, other.started_at) == (me.pid, me.started_at) or not is_living(other.pid, other.started_at):
        return None
    hint = "stop it, or choose another directory"
    return DirectoryInUse(f"another run (pid {other.pid}) writes to {store.name}", hint=hint)


def is_living(pid: int, started_at: float) -> bool:
    """Whether the process lives; one that ended and waits to be reaped does not."""
    try:
        process = psutil.Process(pid)
        # Within a second: clocks of boot time are rounded.
        return abs(process.create_time() - started_at) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def read(store: Store) -> Owner | None:
    """The owner, or None if there is none or its record is torn."""
    with suppress(FileNotFoundError, *NO_JSON):
        return msgspec.json.decode(store.files.read(OWNER), type=Owner)
    return None


def release(store: Store, me: Owner) -> None:
    """Stop being the owner, if one still is."""
    if read(store) == me:
        store.delete(OWNER)
