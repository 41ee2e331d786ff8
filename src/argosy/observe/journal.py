"""The journal: an append-only file of framed records that survives kill -9 and a full disk.

A record is bytes; what they mean is the caller's. One writer per file; readers need no lock and no mmap, so
that a journal can lie on NFS. A frame is: magic (4 bytes), length, CRC-32 of length and payload (both
little-endian u32), payload.

J1  A record is one write(2) to an O_APPEND descriptor (a disk that fills up may split it): a killed
    writer leaves whole frames and at most one torn tail.
J2  A torn frame never hides what is appended after it.
J3  A reader skips nothing silently: what is between two valid frames is reported as `Damage`.
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
    """`length` bytes from `offset` on are no valid frame, though valid ones follow."""

    offset: int
    length: int

    def __str__(self) -> str:
        return f"{self.length} damaged bytes at offset {self.offset}"


class DamagedJournal(ArgosyError):
    """Bytes in the middle of a journal are not what was written; `follow` reads across them."""

    def __init__(self, path: str, damage: Damage) -> None:
        super().__init__(path, damage)
        self.path, self.damage = path, damage

    def __str__(self) -> str:
        return f"journal is damaged: {self.path}: {self.damage}"


class Journal:
    """The writing end of a journal, made if it is not there."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._fd = os.open(path, os.O_CREAT | os.O_APPEND | os.O_RDWR | os.O_CLOEXEC, 0o600)

    def is_at(self, path: str | os.PathLike[str]) -> bool:
        """Whether this is the file that lies at `path` now."""
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(path))
        except OSError:
            return False

    def append(self, record: bytes, *, sync: bool = False) -> None:
        """Add a record; with `sync` it is on the disk when this returns.

        Raises:
            OSError: the record is not in the journal (a full disk). The next append may be tried as usual.
            ValueError: the record is larger than RECORD_MAX.
        """
        if len(record) > RECORD_MAX:
            raise ValueError(f"a record is at most {RECORD_MAX} bytes: {len(record)}")
        frame = memoryview(_frame(record))
        start = os.fstat(self._fd).st_size
        try:
            while frame:
                frame = frame[os.write(self._fd, frame) :]
        except OSError:
            # The part that fitted is taken back. Where even that fails, a reader reports damage (J2, J3).
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, start)
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


class Entry(msgspec.Struct, frozen=True):
    """A record, and the offset from which reading goes on after it."""

    record: bytes
    end: int


def read_journal(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """Yield the records; a torn tail ends them quietly.

    Raises:
        OSError: the file cannot be read.
        DamagedJournal: at the place where bytes in the middle are damaged. `follow` reads across it.
    """
    for item in follow(path):
        if isinstance(item, Damage):
            raise DamagedJournal(os.fspath(path), item)
        yield item.record


def follow(path: str | os.PathLike[str], offset: int = 0) -> Iterator[Entry | Damage]:
    """Yield what is in the journal from `offset` on, and end where whole frames end.

    To go on later, pass the `end` of the last Entry. Damage is yielded before the entry after it; a damaged
    tail cannot be told from a frame that is being written, and is left for the next call.
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
                if isinstance(item, Entry):
                    taken = item.end - offset
            data, offset = data[taken:], offset + taken


def _scan(data: bytes, base: int, more: bool) -> Iterator[Entry | Damage]:
    """Yield the frames of `data`, which lies at offset `base`, and the damage between them.

    A frame that is cut off ends the scan if `more` data can be had; at the end of the file what was appended
    after it is looked for. (The magic is not UTF-8: no text inside a record is taken for a frame.)
    """
    at = good = 0  # data[good:at] belongs to no frame
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
        yield Entry(record, base + end)
        at = good = end


def _frame(record: bytes) -> bytes:
    return _FRAME.pack(_MAGIC, len(record), _checksum(record)) + record


def _checksum(record: bytes) -> int:
    return zlib.crc32(record, zlib.crc32(_LENGTH.pack(len(record))))
