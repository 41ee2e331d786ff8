"""Perform the operations of a save on a local directory, and read from one."""

import ctypes
import errno
import mmap
import os
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Protocol

from argosy._select import native
from argosy.checkpoint.format import BLOCK
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
from argosy.fabric import sync_directory

WRITERS = 4
BATCH = 4 * WRITERS
"""Writes that are collected before they go out: the operations behind them may not be known yet."""


class Files(Protocol):
    """Where checkpoints can be read from; paths are relative, missing files raise FileNotFoundError."""

    @property
    def place(self) -> str:
        """The same for all on a host who find the same files; empty: for nobody."""
        ...

    def listdir(self, path: str) -> list[str]: ...
    def read(self, path: str) -> bytes: ...
    def size(self, path: str) -> int: ...
    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        """Fill `buffer` up to the file's end, and return how many bytes that was."""
        ...


class LocalFiles:
    """Checkpoints in a directory. Bulk reads go past the page cache where the file system lets them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.is_direct = True
        self._open: dict[str, int] = {}
        self._lock = Lock()

    @property
    def place(self) -> str:
        found = self.directory.stat()
        return f"{found.st_dev}:{found.st_ino}"

    def listdir(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(self.directory / path))
        except FileNotFoundError:
            return []
        except NotADirectoryError:
            if path == ".":  # Nobody knows what was here.
                raise
            return []

    def read(self, path: str) -> bytes:
        return (self.directory / path).read_bytes()

    def size(self, path: str) -> int:
        return (self.directory / path).stat().st_size

    def descriptor(self, path: str) -> int:
        """A file to be read, past the page cache unless others read it too; open until `close`."""
        fd = self._open.get(path)
        if fd is None:
            with self._lock:
                fd = self._open.get(path)
                if fd is None:
                    make = open_direct if self.is_direct else os.open
                    fd = self._open[path] = make(self.directory / path, os.O_RDONLY)
        return fd

    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        fd = self.descriptor(path)
        done = 0
        while done < len(buffer):
            count = os.preadv(fd, [buffer[done:]], offset + done)
            done += count
            if count == 0 or count % BLOCK:  # The end of the file.
                break
        return done

    def close(self) -> None:
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()


def open_direct(path: Path, flags: int) -> int:
    """Open for I/O past the page cache; tmpfs and some network file systems have no such thing."""
    try:
        return os.open(path, flags | os.O_DIRECT, 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o644)


def allocate(fd: int, length: int) -> None:
    """Reserve blocks, if the file system can.

    O_DIRECT writes behind the end of a file exclude each other; on ext4 reserving first made a save twice as fast.

    Raises:
        OSError: there is no room.
    """
    call = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if call is None:
        return
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong)
    if call(fd, 0, 0, length) and ctypes.get_errno() not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def aligned(size: int) -> mmap.mmap:
    """A buffer that O_DIRECT takes, rounded up to whole blocks."""
    return mmap.mmap(-1, max(BLOCK, -(-size // BLOCK) * BLOCK), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class Disk:
    """Performs operations below a directory. `arena` is what `Slice` refers to."""

    def __init__(self, directory: Path, arena: memoryview | None = None) -> None:
        self.directory, self.arena = directory, arena
        self._files: dict[str, tuple[int, int]] = {}

    def perform(self, operations: Iterable[Operation], before: Callable[[Operation], None] | None = None) -> None:
        """Perform in order, each when it is known; writes of the arena that follow each other go out side by side.

        Raises:
            OSError: what was performed stays; nothing after it was begun.
        """
        batch: list[Write] = []
        try:
            for operation in operations:
                if before:
                    before(operation)
                if isinstance(operation, Write) and isinstance(operation.data, Slice):
                    batch.append(operation)
                    if len(batch) == BATCH:
                        self._flush(batch)
                    continue
                self._flush(batch)
                self._perform(operation)
            self._flush(batch)
        finally:
            for direct, plain in self._files.values():
                for fd in {direct, plain}:
                    os.close(fd)
            self._files.clear()

    def _flush(self, batch: list[Write]) -> None:
        if not batch:
            return
        assert self.arena is not None
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.arena))
        rows = [
            (self._files[write.path][0], address + write.data.start, write.offset, write.data.length)
            for write in batch
            if isinstance(write.data, Slice)
        ]
        batch.clear()
        native.write_files(struct.pack(f"<{4 * len(rows)}q", *(field for row in rows for field in row)), WRITERS)

    def _write(self, path: str, offset: int, data: memoryview) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._files[path][1], data[done:], offset + done)

    def _perform(self, operation: Operation) -> None:
        at = self.directory
        match operation:
            case Mkdir(path):
                (at / path).mkdir(parents=True, exist_ok=True)
            case Create(path):
                plain = os.open(at / path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
                self._files[path] = (plain, plain)
                self._files[path] = (open_direct(at / path, os.O_WRONLY | os.O_CLOEXEC), plain)
            case Allocate(path, length):
                allocate(self._files[path][1], length)
            case Write(path, offset, data):
                assert isinstance(data, bytes)
                self._write(path, offset, memoryview(data))
            case Truncate(path, length):
                os.ftruncate(self._files[path][1], length)
            case Sync(path):
                os.fdatasync(self._files[path][1])
            case Rename(path, target):
                (at / path).rename(at / target)
            case SyncDir(path):
                sync_directory(at / path)
            case Unlink(path):
                (at / path).unlink(missing_ok=True)
            case Rmdir(path):
                with suppress(FileNotFoundError):
                    (at / path).rmdir()
            case Ack():
                pass
