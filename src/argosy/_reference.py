"""The functions of `_native` in Python: what tests compare it with, and what serves where it is not built."""

import ctypes
import errno
import fcntl
import functools
import os
import struct
from collections.abc import Callable, Sequence

from argosy import _exchange

_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02

# struct pidfd_info of linux/pidfd.h in its first published size: mask, cgroup id, eleven ids, exit code.
_PIDFD_INFO = struct.Struct("=QQ11Ii")
_PIDFD_INFO_EXIT = 1 << 3
# _IOWR(0xFF, 11, struct pidfd_info).
_PIDFD_GET_INFO = (3 << 30) | (_PIDFD_INFO.size << 16) | (0xFF << 8) | 11


@functools.cache
def _fallocate() -> Callable[[int, int, int, int], int]:
    libc = ctypes.CDLL(None, use_errno=True)
    function = libc.fallocate64
    function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return function


def punch_hole(fd: int, offset: int, length: int) -> None:
    """Give back the disk blocks of `length` bytes at `offset`; they read as zeros, the file's size stays."""
    while _fallocate()(fd, _PUNCH_HOLE | _KEEP_SIZE, offset, length) != 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def pidfd_exit_status(pidfd: int) -> int | None:
    """The wait status of the process behind `pidfd`, whoever reaped it; None if the kernel cannot tell."""
    request = _PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13)
    try:
        answer = _PIDFD_INFO.unpack(fcntl.ioctl(pidfd, _PIDFD_GET_INFO, request))
    except OSError as error:
        # Kernels before 6.13 know no such request, those before 6.15 keep nothing of a reaped process.
        if error.errno in (errno.ENOTTY, errno.EINVAL, errno.ESRCH):
            return None
        raise
    return answer[-1] if answer[0] & _PIDFD_INFO_EXIT else None


def run_collective(
    segment: int,
    rank: int,
    head: bytes,
    sends: Sequence[tuple[int, int]],
    receives: Sequence[tuple[int, int]],
    timeout_s: float,
) -> int:
    """Take part in the collective that `head` describes; 0, or how it broke: 1 abort, 2 mismatch, 3 deadline."""
    return _exchange.run_collective(segment, rank, head, sends, receives, timeout_s)
