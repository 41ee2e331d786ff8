"""How long a keeper lives: as long as its run and its directory. And how one is found."""

import hashlib
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from argosy.checkpoint.stores import is_url
from argosy.fabric import here, runtime_dir

AGENT_GONE_S = 60.0
"""Without an agent for so long, a run is over: the agent's warden would have started another."""
PLACE_GONE_S = 5.0
"""Without its directory for so long, a run is over; a save makes the directory again."""


class Life(msgspec.Struct, frozen=True):
    """The run that a keeper lives as long as."""

    run: str
    directory: str
    launch: int
    agent: str


class _Record(msgspec.Struct):
    launch: int
    state: str


class Place:
    """The directory that a keeper serves, known by what it is, not by its name.

    L2  A keeper serves one directory. It holds it open, so its inode number is not used again: a directory that was
        removed and made again, or replaced by a copy, is noticed; moved away and back it is the same. Not for stores.
    """

    def __init__(self, path: str) -> None:
        self._path, self._fd = path, -1
        self.bind()

    def bind(self) -> None:
        """Take what is there now, if it was not there before."""
        if self._fd < 0 and not is_url(self._path):
            with suppress(OSError):
                self._fd = os.open(self._path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def look(self) -> Literal["there", "gone", "replaced"]:
        """What cannot be looked at may be there."""
        if self._fd < 0:
            return "there"
        try:
            is_same = os.path.samestat(os.stat(self._path), os.fstat(self._fd))
        except FileNotFoundError:
            return "gone"
        except OSError:
            return "there"
        return "there" if is_same else "replaced"


class Pulse:
    """Decides whether the run goes on; asked again and again, with the time.

    L1  A keeper outlives neither the directory whose snapshots it keeps nor its run's.
    """

    def __init__(self, life: Life, place: Place) -> None:
        self._life, self._place = life, place
        self._seen_at: dict[str, float] = {}

    def beats(self, now: float) -> bool:
        with suppress(OSError, msgspec.MsgspecError):
            record = read_record(self._life.directory)
            if record.state == "ended" or record.launch != self._life.launch:
                return False
        are_there = self._place.look() != "gone" and not is_gone(Path(self._life.directory, "run.json"))
        return self._lately("places", now, PLACE_GONE_S, are_there) and self._lately(
            "agent", now, AGENT_GONE_S, answers(Path(self._life.agent))
        )

    def _lately(self, what: str, now: float, limit_s: float, is_there: bool) -> bool:
        if is_there or what not in self._seen_at:
            self._seen_at[what] = now
        return now - self._seen_at[what] < limit_s


def read_record(directory: str) -> _Record:
    return msgspec.json.decode(Path(directory, "run.json").read_bytes(), type=_Record)


def is_gone(path: Path) -> bool:
    try:
        path.stat()
    except OSError as error:  # What cannot be looked at may be there.
        return isinstance(error, FileNotFoundError)
    return False


def answers(path: Path) -> bool:
    """Whether somebody listens at a socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(1.0)
        try:
            sock.connect(str(path))
        except OSError:
            return False
        return True


def default_life() -> Life | None:
    """That of the run, under `argosy run`."""
    place = here()
    if place.launcher != "argosy" or place.directory is None:
        return None
    record = read_record(str(place.directory))
    return Life(place.run, str(place.directory), record.launch, str(place.socket))


def home() -> Path:
    """The private directory where keepers listen: the agent's, under a launcher."""
    agent = here().socket
    return agent.parent if agent is not None else runtime_dir()


def place_name(path: str) -> str:
    """How a directory of checkpoints or a store is called in the names of sockets."""
    known = path.rstrip("/") if is_url(path) else os.path.realpath(path)
    return hashlib.blake2s(os.fsencode(known), digest_size=6).hexdigest()


def socket_path(path: str, life: Life) -> Path:
    """Where the keeper of this place and life listens."""
    life_name = hashlib.blake2s(life.run.encode(), digest_size=4).hexdigest()
    return home() / f"keeper-{place_name(path)}-{life_name}.sock"


def known_keepers(path: str) -> list[Path]:
    """The sockets of keepers of this place."""
    return sorted(home().glob(f"keeper-{place_name(path)}-*.sock"))
