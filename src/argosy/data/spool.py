"""Items as files in a directory: they outlive whoever put them there and whoever takes them.

An item lies in `new` until a place in the order of all items is decided for it, and in `taken` from then on. The order
is a row of files in `order`, each named by the position of its first item, each a list of names.

O1  An item is there as a whole or not at all: it is written and synced elsewhere, then renamed.
O2  A stretch of the order is decided once, by whoever links its file first; the others read that.
O3  Nothing has two places: whoever decides a stretch has moved the items of all stretches before it to `taken`.
"""

import errno
import itertools
import os
import time
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from argosy.core import ConfigError
from argosy.data.errors import Unreadable
from argosy.fabric import sync_directory

ABANDONED_S = 3600.0
"""A file that somebody began to write so long ago will not be finished."""
_counter = itertools.count()


class Decide(msgspec.Struct, frozen=True):
    """These items take the positions from `start` on."""

    start: int
    names: list[str]


class TooFew(msgspec.Struct, frozen=True):
    """Items are missing."""

    there: int
    needed: int


def decide_order(start: int, count: int, stretches: Sequence[int], new: Sequence[str]) -> Decide | TooFew:
    """Which items take the free positions from `start` on, `count` of them or up to the next stretch. Pure."""
    count = min([count, *(each - start for each in stretches if each > start)])
    return Decide(start, sorted(new)[:count]) if len(new) >= count else TooFew(len(new), count)


class Spool:
    """The directory of one queue."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._new, self._taken, self._order = (directory / name for name in ("new", "taken", "order"))
        self._unfinished = directory / "unfinished"

    def open(self) -> None:
        """Make the directory, or see that it is ours: what lies in it is unpickled.

        Raises:
            ConfigError: others may write to it.
        """
        for folder in (self._new, self._taken, self._order, self._unfinished):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.stat()
            if found.st_uid != os.geteuid() or found.st_mode & 0o022:
                raise ConfigError(
                    f"other users can write to {folder}", hint=f"chmod -R go-w {self.directory}, or another directory"
                )

    # -- items -------------------------------------------------------------------------------------

    def waiting(self) -> int:
        """How many items wait for a place in the order."""
        return len(os.listdir(self._new))

    def knows(self, name: str) -> bool:
        """Whether an item of this name is there; it moves from `new` to `taken`, so it is looked for in this order."""
        return (self._new / name).exists() or (self._taken / name).exists()

    def add(self, name: str, content: bytes) -> None:
        """Add an item (O1)."""
        self._write(content).replace(self._new / name)

    def read(self, name: str) -> bytes:
        """What an item that has its place holds.

        Raises:
            Unreadable: it is not there.
        """
        try:
            return (self._taken / name).read_bytes()
        except OSError as error:
            raise Unreadable(str(self._taken / name), str(error.strerror), hint="items go by themselves") from error

    def some(self, count: int) -> list[bytes]:
        """What any items hold, without taking them: fewer than `count`, if there are no more."""
        found: list[bytes] = []
        for folder in (self._new, self._taken):  # The way on which items move.
            for name in sorted(os.listdir(folder))[: count - len(found)]:
                with suppress(OSError):  # It has just been moved, or deleted.
                    found.append((folder / name).read_bytes())
        return found

    # -- the order ---------------------------------------------------------------------------------

    def stretches(self) -> list[int]:
        """The positions at which the stretches of the order begin."""
        return sorted(int(name) for name in os.listdir(self._order))

    def settle(self) -> None:
        """Finish what somebody who died has left half done (O3)."""
        for start in self.stretches():
            self._move(self._names(start))

    def find(self, start: int, count: int) -> list[str] | TooFew:
        """The items at `count` positions from `start` on; what is not decided yet is decided, if there are enough."""
        found: list[str] = []
        while len(found) < count:
            at = start + len(found)
            stretches = self.stretches()
            place = bisect_right(stretches, at)
            names = self._names(stretches[place - 1])[at - stretches[place - 1] :] if place else []
            if not names:
                decision = decide_order(at, count - len(found), stretches, os.listdir(self._new))
                if isinstance(decision, TooFew):
                    return decision
                self._decide(decision)
                names = self._names(at)
            self._move(names)
            found += names
        return found[:count]

    def forget(self, before: int) -> None:
        """Delete the items of stretches that end before a position, and what was never finished."""
        stretches = self.stretches()
        for start in stretches[: max(0, bisect_right(stretches, before) - 1)]:
            for name in self._names(start):
                (self._taken / name).unlink(missing_ok=True)
            (self._order / _position(start)).unlink(missing_ok=True)
        for path in self._unfinished.iterdir():
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > ABANDONED_S:
                    path.unlink()

    def _decide(self, decision: Decide) -> None:
        """Publish a stretch, unless somebody was faster (O2); it must not survive a power cut without its items."""
        sync_directory(self._new)
        written = self._write(msgspec.json.encode(decision.names))
        with suppress(FileExistsError):
            os.link(written, self._order / _position(decision.start))
        written.unlink()

    def _names(self, start: int) -> list[str]:
        path = self._order / _position(start)
        try:
            return msgspec.json.decode(path.read_bytes(), type=list[str])
        except FileNotFoundError:
            return []  # Forgotten a moment ago.
        except (OSError, msgspec.MsgspecError) as error:
            raise Unreadable(str(path), str(error)) from error

    def _move(self, names: Sequence[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError):  # Another rank did.
                (self._new / name).rename(self._taken / name)

    def _write(self, content: bytes) -> Path:
        path = self._unfinished / f"{os.getpid()}.{time.time_ns()}.{next(_counter)}"
        try:
            with path.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return path


def is_full(error: OSError) -> bool:
    """Whether there is no room on the disk: there may be later."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def _position(start: int) -> str:
    return f"{start:020d}"
