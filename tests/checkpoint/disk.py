"""A disk that can crash: what operations left behind, under models of what a crash keeps."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from argosy.checkpoint.operations import (
    Ack,
    Allocate,
    Create,
    Mkdir,
    Operation,
    Rename,
    Rmdir,
    Slice,
    Sync,
    SyncDir,
    Truncate,
    Unlink,
    Write,
)

SECTOR = 512


@dataclass
class Inode:
    """A file: what is synced, and what was written since."""

    synced: bytes = b""
    pending: list[tuple[int, bytes] | int] = field(default_factory=list)
    """Writes (offset, data) and truncations (length)."""

    def content(self, chosen: list[tuple[int, bytes] | int] | None = None) -> bytes:
        data = bytearray(self.synced)
        for change in self.pending if chosen is None else chosen:
            if isinstance(change, int):
                data = data[:change].ljust(change, b"\0")
            else:
                offset, written = change
                data = data.ljust(offset, b"\0")
                data[offset : offset + len(written)] = written
        return bytes(data)


@dataclass
class CrashingDisk:
    """Names point to inodes; a name is durable only when its directory was synced."""

    arena: bytes = b""
    names: dict[str, Inode] = field(default_factory=dict)
    durable: dict[str, Inode] = field(default_factory=dict)
    """Names that survive any crash."""
    moves: list[tuple[str, str | None, str | None, Inode | None]] = field(default_factory=list)
    """(directory, name gone, name new, inode) since its directory was synced; one move is atomic."""
    directories: set[str] = field(default_factory=set)
    durable_directories: set[str] = field(default_factory=set)
    acked: list[int] = field(default_factory=list)

    def perform(self, operation: Operation) -> None:
        match operation:
            case Mkdir(path):
                self.directories.add(path)
            case Create(path):
                self.names[path] = Inode()
                self._move(path, None, path, self.names[path])
            case Write(path, offset, data):
                if isinstance(data, Slice):
                    data = self.arena[data.start : data.start + data.length].ljust(data.length, b"\0")
                self.names[path].pending.append((offset, data))
            case Truncate(path, length) | Allocate(path, length):
                self.names[path].pending.append(length)
            case Sync(path):
                inode = self.names[path]
                inode.synced, inode.pending = inode.content(), []
            case Rename(path, target):
                self.names[target] = self.names.pop(path)
                self._move(path, path, target, self.names[target])
            case SyncDir(path):
                self._sync_directory(path)
            case Unlink(path):
                if self.names.pop(path, None):
                    self._move(path, path, None, None)
            case Rmdir(_):
                pass
            case Ack(step):
                self.acked.append(step)

    def _move(self, path: str, gone: str | None, new: str | None, inode: Inode | None) -> None:
        self.moves.append((path.rpartition("/")[0], gone, new, inode))

    def _sync_directory(self, path: str) -> None:
        # The top directory: steps below it can be found after a crash only if it was synced.
        if path == ".":
            self.durable_directories |= self.directories
            return
        kept = []
        for move in self.moves:
            if move[0] == path:
                self._apply(self.durable, move)
            else:
                kept.append(move)
        self.moves = kept

    @staticmethod
    def _apply(names: dict[str, Inode], move: tuple[str, str | None, str | None, Inode | None]) -> None:
        _, gone, new, inode = move
        if gone is not None:
            names.pop(gone, None)
        if new is not None and inode is not None:
            names[new] = inode

    def after_kill(self) -> dict[str, bytes]:
        """The processes died, the machine did not: everything written is there."""
        return {path: inode.content() for path, inode in self.names.items()}

    def after_power_cut(self) -> dict[str, bytes]:
        """Only what was synced is there."""
        there = getattr(self, "durable_directories", set())
        return {
            path: inode.synced
            for path, inode in self.durable.items()
            if path.rpartition("/")[0] in there or "/" not in path
        }

    def after_anything(self, rng: random.Random) -> dict[str, bytes]:
        """Any subset of what was not synced is there, writes torn at sectors, some sectors zeroed."""
        there = set(self.durable_directories)
        there |= {directory for directory in self.directories if rng.random() < 0.7}
        names = dict(self.durable)
        for move in self.moves:
            if rng.random() < 0.6:
                self._apply(names, move)
        found = {}
        for path, inode in names.items():
            if path.rpartition("/")[0] in there:
                found[path] = inode.content(list(_torn(inode.pending, rng)))
        return found


def _torn(pending: list[tuple[int, bytes] | int], rng: random.Random) -> Iterator[tuple[int, bytes] | int]:
    for change in pending:
        if isinstance(change, int):
            if rng.random() < 0.8:
                yield change
            continue
        offset, data = change
        if rng.random() < 0.3:
            continue
        for at in range(0, len(data), SECTOR):
            kind = rng.random()
            sector = data[at : at + SECTOR]
            if kind < 0.85:
                yield offset + at, sector
            elif kind < 0.93:
                yield offset + at, bytes(len(sector))


class MemoryFiles:
    """What a crash left, as the code that reads checkpoints sees it."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files

    def listdir(self, path: str) -> list[str]:
        prefix = "" if path == "." else f"{path}/"
        return sorted({name[len(prefix) :].partition("/")[0] for name in self.files if name.startswith(prefix)})

    def read(self, path: str) -> bytes:
        if path not in self.files:
            raise FileNotFoundError(path)
        return self.files[path]

    def size(self, path: str) -> int:
        return len(self.read(path))

    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        data = self.read(path)[offset : offset + len(buffer)]
        buffer[: len(data)] = data
        return len(data)
