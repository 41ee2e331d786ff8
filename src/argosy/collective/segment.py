"""The shared memory of one group and one generation: its layout, its mapping, and how to read what ranks wrote.

It does not run operations: the engine does, in native code. A segment is an anonymous file (memfd): it needs no space
in /dev/shm, and nothing is left behind. An abort ends its use; a new generation makes a new one.

A header of 4096 bytes is followed by a region per rank: words, two heads, two windows of slots, and an inbox ring for
each sender. native/src/segment.rs has the same offsets.
"""

import ctypes
import errno
import mmap
import os
import struct

from argosy._select import native
from argosy.collective.request import HEAD_BYTES, Request
from argosy.core import ArgosyError, PeerLost

MAGIC = int.from_bytes(b"ARGSEGM\x01", "little")
_HEADER = struct.Struct("<QIIQIIII16s")
_STATE_AT, _CAUSE_AT, _CAUSE_BYTES = 64, 256, 400
_FIRST_AT, _HEADS_AT, _DOORBELL_AT, _LAST_HEAD_AT = 4096, 256, 64, 192
RING_HEADER = 128
SLOT_BYTES = 128 << 10
WINDOW_MAX = 8
"""Slots of a rank for one operation: how far a rank can run ahead of the others."""

ROOM_BYTES = 16 << 20
"""Memory that the groups of a process may take together; beyond it, groups get the smallest segments."""

_INBOX_BYTES = 64 << 10

ABORT_DEADLINE = 0xFFFFFFFE
ABORT_ELSEWHERE = 0xFFFFFFFF

_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(os.uname().machine)
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_libc = ctypes.CDLL(None, use_errno=True)


class Shape:
    """The layout of a segment for `size` ranks."""

    def __init__(self, size: int, window: int) -> None:
        self.size, self.slot, self.window = size, SLOT_BYTES, window
        self.head_stride = -(-(HEAD_BYTES + 16 * size) // 64) * 64
        slots_at = -(-(_HEADS_AT + 2 * self.head_stride) // 4096) * 4096
        self.rings_at = slots_at + 2 * self.window * self.slot
        self.ring = max(4 << 10, window * _INBOX_BYTES // size) // 64 * 64
        self.stride = -(-(self.rings_at + size * (RING_HEADER + self.ring)) // 4096) * 4096
        self.total = _FIRST_AT + size * self.stride

    def pack(self) -> bytes:
        identity = os.urandom(16)
        return _HEADER.pack(
            MAGIC, self.size, self.slot, self.stride, self.head_stride, self.ring, self.window, 0, identity
        )


def window_for(room: int) -> int:
    """Return the slots of a new group if `room` bytes per rank are left: a quarter of these, at least one slot."""
    return max(1, min(WINDOW_MAX, room // 4 // (2 * SLOT_BYTES + _INBOX_BYTES)))


def create(size: int, window: int) -> int:
    """Return the descriptor of a new segment for `size` ranks.

    Raises:
        ArgosyError: there is not enough memory for it.
    """
    shape = Shape(size, window)
    fd = os.memfd_create("argosy-collective", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, shape.total)  # If memory is short, this raises instead of a SIGBUS later.
        os.pwrite(fd, shape.pack(), 0)
    except OSError as error:
        os.close(fd)
        if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise ArgosyError(f"no memory for a group's buffers, {shape.total} bytes: {error.strerror}") from error
        raise
    return fd


class GroupSegment:
    """A mapped segment, as one of its ranks sees it."""

    def __init__(self, fd: int, shape: Shape, rank: int) -> None:
        self.shape, self.rank = shape, rank
        self._memory = mmap.mmap(fd, self.shape.total)
        self._anchor = ctypes.c_char.from_buffer(self._memory)
        self.address = ctypes.addressof(self._anchor)
        self.view = memoryview(self._memory)
        magic, count, slot, stride, *_ = _HEADER.unpack_from(self.view)
        if (magic, count, slot, stride) != (MAGIC, shape.size, shape.slot, shape.stride):
            raise ArgosyError("a peer made its shared segment with another version of Argosy")

    # -- aborting ----------------------------------------------------------------------------------

    def abort(self, code: int, cause: str = "") -> None:
        """End every wait in the segment, now and later. The first abort wins."""
        if native.abort_segment(self.address, code):
            self.set_cause(cause)
        for rank in range(self.shape.size):
            self.ring_doorbell(rank)

    def set_cause(self, cause: str) -> None:
        """Write why the segment is aborted, for the others; called by the process that aborted it."""
        raw = cause.encode()[: _CAUSE_BYTES - 1]
        self.view[_CAUSE_AT + 1 : _CAUSE_AT + len(raw)] = raw[1:]
        self.view[_CAUSE_AT : _CAUSE_AT + 1] = raw[:1] or b"\0"  # Last: readers wait for the first byte.

    def abort_reason(self) -> tuple[int, str] | None:
        """Return the code and the cause of the abort, or None."""
        code = self._word(_STATE_AT + 4).value
        if code == 0:
            return None
        raw = bytes(self.view[_CAUSE_AT : _CAUSE_AT + _CAUSE_BYTES])
        return code, raw.split(b"\0", 1)[0].decode(errors="replace")

    # -- reading what ranks wrote ------------------------------------------------------------------

    def stage(self, rank: int) -> int:
        return self._word(self._region(rank)).value

    def request(self, rank: int, stage: int | None = None) -> tuple[Request, tuple[int, ...]]:
        """Return the request of `rank` in `stage` (default: its last), with the sizes that it sends and receives."""
        region = self._region(rank)
        which = self._word(region + _LAST_HEAD_AT).value if stage is None else stage
        at = region + _HEADS_AT + which % 2 * self.shape.head_stride
        lengths = struct.unpack_from(f"<{2 * self.shape.size}Q", self.view, at + HEAD_BYTES)
        return Request.unpack(bytes(self.view[at : at + HEAD_BYTES])), lengths

    # -- point to point ----------------------------------------------------------------------------

    def ring_at(self, sender: int, receiver: int) -> int:
        """Return the offset of the ring in which `sender` writes to `receiver`."""
        step = RING_HEADER + self.shape.ring
        return self._region(receiver) + self.shape.rings_at + sender * step

    def doorbell(self, rank: int) -> int:
        return self._word(self._region(rank) + _DOORBELL_AT).value

    def ring_doorbell(self, rank: int) -> None:
        word = self._word(self._region(rank) + _DOORBELL_AT)
        word.value += 1  # Two at once may count as one: both wake the sleeper.
        wake(self.address + self._region(rank) + _DOORBELL_AT)

    def await_doorbell(self, heard: int, most_s: float) -> None:
        """Sleep until this rank's doorbell rings, for at most `most_s`."""
        sleep(self.address + self._region(self.rank) + _DOORBELL_AT, heard, most_s)

    def _region(self, rank: int) -> int:
        return _FIRST_AT + rank * self.shape.stride

    def _word(self, offset: int) -> ctypes.c_uint32:
        return ctypes.c_uint32.from_buffer(self._memory, offset)


def sleep(address: int, expected: int, most_s: float) -> None:
    """Wait on a word of shared memory while it is `expected`, without the GIL."""
    if _SYS_FUTEX is None:
        ctypes.CDLL(None).usleep(min(1000, int(most_s * 1e6)))
        return
    time = _Timespec(int(most_s), int(most_s % 1 * 1e9))
    _libc.syscall(
        _SYS_FUTEX, ctypes.c_void_p(address), _FUTEX_WAIT, ctypes.c_uint32(expected), ctypes.byref(time), None, 0
    )


def wake(address: int) -> None:
    """Wake all threads that wait on a word of shared memory."""
    if _SYS_FUTEX is not None:
        _libc.syscall(_SYS_FUTEX, ctypes.c_void_p(address), _FUTEX_WAKE, 0x7FFFFFFF, None, None, 0)


def open_peer_segment(where: tuple[int, int, int], shape: Shape, rank: int) -> GroupSegment:
    """Map the segment that another process holds open; `where` is its pid, the descriptor and the inode.

    Raises:
        PeerLost: the process is gone, or has closed it: the descriptor may belong to another file or segment now.
        PermissionError: this process may not read the other's /proc entries. Also, for a moment, if the other is being
            killed, or if the descriptor belongs to a file under /proc/sys now.
    """
    pid, fd, inode = where
    try:
        own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:  # Also if the number belongs to a socket or a directory now.
        if isinstance(error, PermissionError):
            raise
        raise PeerLost("rank 0", "gone before its shared memory was opened") from error
    try:
        if os.fstat(own).st_ino != inode:
            raise PeerLost("rank 0", "it abandoned this generation before its shared memory was opened")
        return GroupSegment(own, shape, rank)
    finally:
        os.close(own)
