"""The items of a queue as files in a directory: they outlive the processes that put and take them.

An item is in `new` until its position in the order of all items is decided, and in `taken` from then on. The order is
a sequence of files in `order`, one per stretch, each a list of names, named by the position of its first item.

O1  An item is complete or absent: it is written and synced elsewhere, then renamed.
O2  A stretch of the order is decided once, by the process that links its file first; the others read that file.
O3  No item has two positions: a process decides a stretch only after all items before it were moved to `taken`.
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
"""Unfinished files of this age are deleted."""
_counter = itertools.count()


class Decide(msgspec.Struct, frozen=True):
    """These items take the positions from `start` on."""

    start: int
    names: list[str]


class TooFew(msgspec.Struct, frozen=True):
    """There are fewer items than needed."""

    there: int
    needed: int


def decide_order(start: int, count: int, stretches: Sequence[int], new: Sequence[str]) -> Decide | TooFew:
    """Decide which items take the free positions from `start` on, `count` of them or up to the next stretch. Pure."""
    count = min([count, *(each - start for each in stretches if each > start)])
    return Decide(start, sorted(new)[:count]) if len(new) >= count else TooFew(len(new), count)


class Spool:
    """The directory of one queue."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._new, self._taken, self._order = (directory / name for name in ("new", "taken", "order"))
        self._unfinished = directory / "unfinished"

    def open(self) -> None:
        """Make the directory, or check that only this user can write to it: its files are unpickled.

        Raises:
            ConfigError: other users can write to it.
        """
        for folder in (self._new, self._taken, self._order, self._unfinished):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.stat()
            if found.st_uid != os.geteuid() or found.st_mode & 0o022:
                raise ConfigError(
                    f"other users can write to {folder}",
                    hint=f"chmod -R go-w {self.directory}, or use another directory",
                )

    # -- items -------------------------------------------------------------------------------------

    def waiting(self) -> int:
        """How many items have no position yet."""
        return len(os.listdir(self._new))

    def knows(self, name: str) -> bool:
        """Whether an item of this name exists. Items move from `new` to `taken`, so `new` is searched first."""
        return (self._new / name).exists() or (self._taken / name).exists()

    def add(self, name: str, content: bytes) -> None:
        """Add an item (O1)."""
        self._write(content).replace(self._new / name)

    def read(self, name: str) -> bytes:
        """Return the content of an item that has a position.

        Raises:
            Unreadable: the file is missing.
        """
        try:
            return (self._taken / name).read_bytes()
        except OSError as error:
            hint = "do not delete items: the queue deletes them when a checkpoint includes them"
            raise Unreadable(str(self._taken / name), str(error.strerror), hint=hint) from error

    def some(self, count: int) -> list[bytes]:
        """Return the content of up to `count` items, without taking them."""
        found: list[bytes] = []
        for folder in (self._new, self._taken):  # In the direction in which items move.
            for name in sorted(os.listdir(folder))[: count - len(found)]:
                with suppress(OSError):  # It has just been moved, or deleted.
                    found.append((folder / name).read_bytes())
        return found

    # -- the order ---------------------------------------------------------------------------------

    def stretches(self) -> list[int]:
        """The first positions of the stretches."""
        return sorted(int(name) for name in os.listdir(self._order))

    def settle(self) -> None:
        """Move the items of decided stretches that a process left in `new` when it died (O3)."""
        for start in self.stretches():
            self._move(self._names(start))

    def find(self, start: int, count: int) -> list[str] | TooFew:
        """Return the items at `count` positions from `start` on; decide those that are open, if there are enough."""
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
        """Delete the items of stretches that end before a position, and old unfinished files."""
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
        """Publish a stretch, unless another process was first (O2). Its items are made durable before it."""
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
            return []  # `forget` has just deleted it.
        except (OSError, msgspec.MsgspecError) as error:
            raise Unreadable(str(path), str(error)) from error

    def _move(self, names: Sequence[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError):  # Another rank has moved it.
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
    """Whether the disk is full, which may change."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def _position(start: int) -> str:
    return f"{start:020d}"
