"""The journal: an append-only file of framed records that survives kill -9 and a full disk.

It does not interpret the records, which are bytes. One writer per file; readers need no lock and no mmap, so that a
journal can be on NFS. A frame: magic (4 bytes), length, CRC-32 of length and payload (both little-endian u32), payload.

J1  A record is one write(2) to an O_APPEND descriptor (a full disk may split it): a killed writer leaves whole frames
    and at most one torn frame at the end.
J2  A torn frame never hides what is appended after it.
J3  A reader skips nothing silently: bytes between two valid frames are reported as `Damage`.
"""

import contextlib
import os
import struct
import zlib
from collections.abc import Iterator

import msgspec

from argosy.core import ArgosyError

_MAGIC = b"\xa7Jr\x01"
_FRAME = struct.Struct("<4sII")
_LENGTH = struct.Struct("<I")
RECORD_MAX = 64 << 20
_CHUNK = 1 << 20


class Damage(msgspec.Struct, frozen=True):
    """`length` bytes from `offset` on are not a valid frame, but a valid one follows."""

    offset: int
    length: int

    def __str__(self) -> str:
        return f"{self.length} damaged bytes at offset {self.offset}"


class DamagedJournal(ArgosyError):
    """Bytes in the middle of a journal are damaged; `follow` reads past them."""

    def __init__(self, path: str, damage: Damage) -> None:
        super().__init__(path, damage)
        self.path, self.damage = path, damage

    def __str__(self) -> str:
        return f"damaged journal: {self.path}: {self.damage}"


class Journal:
    """The writer of a journal; makes the file if it is missing."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._fd = os.open(path, os.O_CREAT | os.O_APPEND | os.O_RDWR | os.O_CLOEXEC, 0o600)

    def is_at(self, path: str | os.PathLike[str]) -> bool:
        """Whether this is the file that is at `path` now."""
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(path))
        except OSError:
            return False

    def append(self, record: bytes, *, sync: bool = False) -> None:
        """Add a record; with `sync` it is durable when this returns.

        Raises:
            OSError: the record is not in the journal (the disk is full, for example). Later appends may succeed.
            ValueError: the record is larger than RECORD_MAX.
        """
        if len(record) > RECORD_MAX:
            raise ValueError(f"a record is at most {RECORD_MAX} bytes: {len(record)}")
        whole = _frame(record)
        frame = memoryview(whole)
        try:
            while frame:
                frame = frame[os.write(self._fd, frame) :]
        except OSError:
            # Remove the part that was written. If that fails too, a reader reports damage (J2, J3).
            if written := len(whole) - len(frame):
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
            raise
        if sync:
            os.fsync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class JournalEntry(msgspec.Struct, frozen=True):
    """A record, and the offset after it, where reading continues."""

    record: bytes
    end: int


def read_journal(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """Yield the records up to the end or a torn last frame.

    Raises:
        OSError: the file cannot be read.
        DamagedJournal: bytes before the next record are damaged. `follow` reads past them.
    """
    for item in follow(path):
        if isinstance(item, Damage):
            raise DamagedJournal(os.fspath(path), item)
        yield item.record


def follow(path: str | os.PathLike[str], offset: int = 0) -> Iterator[JournalEntry | Damage]:
    """Yield what the journal holds from `offset` on, up to the last complete frame.

    To continue later, pass the `end` of the last entry. Damage is yielded before the entry that follows it. A damaged
    end looks like a frame that is being written, and is left for the next call.
    """
    with open(path, "rb") as file:
        file.seek(offset)
        data, more = b"", True
        while more:
            chunk = file.read(_CHUNK)
            more = bool(chunk)
            data += chunk
            taken = 0
            for item in _scan(data, offset, more):
                yield item
                if isinstance(item, JournalEntry):
                    taken = item.end - offset
            data, offset = data[taken:], offset + taken


def _scan(data: bytes, base: int, more: bool) -> Iterator[JournalEntry | Damage]:
    """Yield the frames of `data`, which begins at offset `base`, and the damage between them.

    An incomplete frame ends the scan if `more` data follows; at the end of the file, later frames are searched for.
    (The magic is not UTF-8: text inside a record is never taken for a frame.)
    """
    at = good = 0  # data[good:at] belongs to no frame.
    while (at := data.find(_MAGIC, at)) >= 0:
        if len(data) - at < _FRAME.size:
            return
        _, length, checksum = _FRAME.unpack_from(data, at)
        body, end = at + _FRAME.size, at + _FRAME.size + length
        if length <= RECORD_MAX and end > len(data) and more:
            return
        record = data[body:end]
        if end > len(data) or _checksum(record) != checksum:
            at += 1
            continue
        if at > good:
            yield Damage(base + good, at - good)
        yield JournalEntry(record, base + end)
        at = good = end


def _frame(record: bytes) -> bytes:
    return _FRAME.pack(_MAGIC, len(record), _checksum(record)) + record


def _checksum(record: bytes) -> int:
    return zlib.crc32(record, zlib.crc32(_LENGTH.pack(len(record))))
