"""One run writes to a directory of checkpoints: the owner is in a file that only one can make."""

import os
import socket
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil

from argosy.core import ConfigError

OWNER = "owner.json"


class Owner(msgspec.Struct, frozen=True):
    """Who writes here."""

    host: str
    pid: int
    started_at: float
    session: str


class DirectoryInUse(ConfigError):
    """Another living run writes to this directory."""


def take(directory: Path, session: str) -> Owner:
    """Become the owner of a directory; a dead owner of this host is replaced.

    Raises:
        DirectoryInUse: the owner lives, or is on another host, where nobody here can look.
    """
    me = Owner(socket.gethostname(), os.getpid(), psutil.Process().create_time(), session)
    directory.mkdir(parents=True, exist_ok=True)
    for _ in range(3):
        try:
            fd = os.open(directory / OWNER, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            other = read(directory)
            if other is not None and (other.pid, other.started_at) != (me.pid, me.started_at):
                _refuse_if_alive(directory, other, me.host)
            with suppress(FileNotFoundError):
                (directory / OWNER).unlink()
            continue
        with os.fdopen(fd, "wb") as file:
            file.write(msgspec.json.encode(me))
        return me
    raise DirectoryInUse(f"another run takes this directory at the same moment: {directory}")


def _refuse_if_alive(directory: Path, other: Owner, host: str) -> None:
    if other.host != host:
        raise DirectoryInUse(
            f"a run on {other.host} (pid {other.pid}) writes to {directory}",
            hint=f"if it is gone, remove {directory / OWNER}",
        )
    with suppress(psutil.NoSuchProcess):
        # Within a second: clocks of boot time are rounded.
        if abs(psutil.Process(other.pid).create_time() - other.started_at) < 1.0:
            raise DirectoryInUse(
                f"another run (pid {other.pid}) writes to {directory}", hint="stop it, or choose another directory"
            )


def read(directory: Path) -> Owner | None:
    """The owner, or None if there is none or its record is torn."""
    with suppress(FileNotFoundError, msgspec.MsgspecError):
        return msgspec.json.decode((directory / OWNER).read_bytes(), type=Owner)
    return None


def release(directory: Path, me: Owner) -> None:
    """Stop being the owner, if one still is."""
    if read(directory) == me:
        with suppress(FileNotFoundError):
            (directory / OWNER).unlink()
