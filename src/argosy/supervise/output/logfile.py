"""Keep a rank's log bounded while the rank goes on appending to it.

The writer holds the file open with O_APPEND, cannot be told anything, and must never be disturbed. So the
middle of the file is punched out: head and newest tail stay, offsets stay, and readers see a hole. Where the
file system cannot punch, the tail is copied to `<path>.1` and the file is cut back to its head: an append
goes to wherever the end then is. Renaming would not help: the writer would follow the old file.
"""

import contextlib
import ctypes
import errno
import os
from dataclasses import dataclass

_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02
_COPY_CHUNK = 1 << 20
BYTES_MAX = 256 << 20
HEAD = 16 << 20


@dataclass(frozen=True, slots=True)
class Bounded:
    """What `bound` did: bytes given back to the disk, and what a person should know, if anything."""

    freed: int = 0
    trouble: str = ""


def cut_note(count: int) -> bytes:
    """The line that stands where `count` bytes of a log are missing."""
    number = f"{count / 1e6:.0f} MB" if count >= 1_000_000 else f"{count / 1e3:.0f} kB"
    return f"... {number} of this log were cut here ...\n".encode()


def punch_hole(fd: int, offset: int, length: int) -> None:
    """Give the blocks of a range back to the file system; the size stays and the range reads as zeros."""
    libc = ctypes.CDLL(None, use_errno=True)
    fallocate = getattr(libc, "fallocate", None)
    if fallocate is None:
        raise OSError(errno.EOPNOTSUPP, "this system has no fallocate")
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, offset, length) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def bound(path: str, bytes_max: int = BYTES_MAX, head: int = HEAD, *, punches: bool = True) -> Bounded:
    """Bring the disk space of a log below `bytes_max`, if it is above.

    Keeps the first `head` bytes (at most a quarter of `bytes_max`) and half of what remains as the newest tail: the
    other half is room to grow until the next call. `punches=False` says that the file system cannot punch. What a
    full or broken disk does is returned in `trouble`, never raised.
    """
    head = min(head, bytes_max // 4)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return Bounded()
    except OSError as error:
        return Bounded(0, f"log cannot be bounded: {path}: {error.strerror}")
    try:
        if _allocated(fd) <= bytes_max:
            return Bounded()
        tail = (bytes_max - head) // 2
        if punches:
            try:
                return _punch(fd, head, tail)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV):
                    return Bounded(0, f"log cannot be punched: {path}: {error.strerror}")
        return _cut_back(path, fd, head, tail)
    except OSError as error:
        return Bounded(0, f"log cannot be bounded: {path}: {error.strerror}")
    finally:
        os.close(fd)


def _allocated(fd: int) -> int:
    status = os.fstat(fd)
    return min(status.st_size, status.st_blocks * 512)


def _punch(fd: int, head: int, tail: int) -> Bounded:
    status = os.fstat(fd)
    block = max(4096, status.st_blksize)
    start = -(-head // block) * block
    end = (status.st_size - tail) // block * block
    if end <= start:
        return Bounded()
    before = status.st_blocks * 512
    punch_hole(fd, start, end - start)
    # The writer may have appended meanwhile: what was freed is at least this.
    return Bounded(max(0, before - os.fstat(fd).st_blocks * 512))


def _cut_back(path: str, fd: int, head: int, tail: int) -> Bounded:
    """Copy the tail aside, then shorten the file under its writer.

    What the writer appends between the last read and the cut is lost: microseconds, because reading goes on
    until nothing new comes, but it cannot be excluded. If the copy fails for want of space the cut is made
    all the same: it is what gives space back.
    """
    size = os.fstat(fd).st_size
    trouble = f"holes are not supported here, log was cut to its head, its tail is in: {path}.1"
    copied, start = 0, max(head, size - tail)
    try:
        copied = _copy(fd, start, f"{path}.1.new", 2 * tail)
        os.replace(f"{path}.1.new", f"{path}.1")
    except OSError as error:
        trouble = f"log was cut to its head, and its tail could not be kept: {path}: {error.strerror}"
        _remove(f"{path}.1.new")
    size = os.fstat(fd).st_size
    os.ftruncate(fd, head)
    try:
        end = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(end, b"\n" + cut_note(size - head))
        finally:
            os.close(end)
    except OSError:
        trouble += " (unmarked)"
    return Bounded(max(0, size - head - copied), trouble)


def _copy(fd: int, start: int, target: str, bytes_max: int) -> int:
    copied = 0
    with open(target, "wb", buffering=0) as file:
        while copied < bytes_max and (data := os.pread(fd, _COPY_CHUNK, start + copied)):
            file.write(data)
            copied += len(data)
    return copied


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
