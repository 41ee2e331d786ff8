"""One run writes to a directory of checkpoints: the owner is in a file that only one can make."""

import os
import socket
from contextlib import suppress

import msgspec
import psutil

from argosy.checkpoint.format import NO_JSON
from argosy.checkpoint.stores import Store
from argosy.core import ConfigError

OWNER = "owner.json"


_here: dict[str, tuple[int, str]] = {}
"""The places that savers of this process write to: its pid, as a fork has them too, and where the saver was made."""


class Owner(msgspec.Struct, frozen=True):
    """Who writes here."""

    host: str
    pid: int
    started_at: float
    session: str


class DirectoryInUse(ConfigError):
    """Another living run writes to this directory."""


def claim(place: str, site: str) -> None:
    """A saver of this process will write to a place.

    Raises:
        DirectoryInUse: another one does.
    """
    pid, other = _here.get(place, (0, ""))
    if pid == os.getpid():
        raise DirectoryInUse(
            f"a Saver of this process writes to {place} already: it was made at {other}",
            hint="use that one, or close it before",
        )
    _here[place] = os.getpid(), site


def disclaim(place: str) -> None:
    """That saver is closed."""
    _here.pop(place, None)


def take(store: Store, session: str) -> Owner:
    """Become the owner of a place; a dead owner of this host is replaced.

    Raises:
        DirectoryInUse: the owner lives, or is on another host, where nobody here can look.
    """
    me = Owner(socket.gethostname(), os.getpid(), psutil.Process().create_time(), session)
    for _ in range(3):
        if store.put(OWNER, msgspec.json.encode(me), only_if_new=True):
            return me
        other = read(store)
        if other is not None and (other.pid, other.started_at) != (me.pid, me.started_at):
            _refuse_if_alive(store, other, me.host)
        store.delete(OWNER)
    raise DirectoryInUse(f"another run takes this directory at the same moment: {store.name}")


def _refuse_if_alive(store: Store, other: Owner, host: str) -> None:
    if other.host != host:
        raise DirectoryInUse(
            f"a run on {other.host} (pid {other.pid}) writes to {store.name}",
            hint=f"if it is gone, remove {store.name}/{OWNER}",
        )
    if is_living(other.pid, other.started_at):
        raise DirectoryInUse(
            f"another run (pid {other.pid}) writes to {store.name}", hint="stop it, or choose another directory"
        )


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
