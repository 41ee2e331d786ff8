"""The functions of `_native` in Python: the tests compare both, and this one is used where `_native` is not built."""

import ctypes
import errno
import fcntl
import functools
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product

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
    """Free the disk blocks of `length` bytes at `offset`; they read as zeros, and the file's size stays."""
    while _fallocate()(fd, _PUNCH_HOLE | _KEEP_SIZE, offset, length) != 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def pidfd_exit_status(pidfd: int) -> int | None:
    """Return the wait status of the process behind `pidfd`, even if it was reaped; None if unknown."""
    request = _PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13)
    try:
        answer = _PIDFD_INFO.unpack(fcntl.ioctl(pidfd, _PIDFD_GET_INFO, request))
    except OSError as error:
        # Kernels before 6.13 have no such request; those before 6.15 forget a reaped process.
        if error.errno in (errno.ENOTTY, errno.EINVAL, errno.ESRCH):
            return None
        raise
    return answer[-1] if answer[0] & _PIDFD_INFO_EXIT else None


def copy_digest(table: bytes, threads: int, progress: int) -> bytes:
    """Copy strided boxes between addresses and return the digest sums of each: 16 bytes per record of `table`.

    A record is 16 little-endian int64: source, destination (0: only sum), logical byte, bytes per run, three counts,
    then three strides each of source, destination and logical position. The caller keeps the memory alive.
    If `progress` is an address, the number of complete records is stored there (uint64); one thread keeps their order.
    """
    if len(table) % _JOB.size:
        raise ValueError("a record has 128 bytes")
    answers = bytearray()
    done = ctypes.c_uint64.from_address(progress) if progress else ctypes.c_uint64()
    for number, job in enumerate(_JOB.iter_unpack(table)):
        sums = [0, 0]
        for source, destination, logical in _runs(job):
            data = ctypes.string_at(source, job[3])
            if destination:
                ctypes.memmove(destination, data, job[3])
            for set_, sum_ in enumerate(_run_sums(data, logical)):
                sums[set_] = (sums[set_] + sum_) % 2**64
        answers += struct.pack("<2Q", *sums)
        done.value = number + 1
    return bytes(answers)


def write_files(table: bytes, threads: int) -> None:
    """Write memory to files from several threads: records of 4 int64, (descriptor, address, offset, length)."""
    for fd, address, offset, length in _records(table, "<4q"):
        data = (ctypes.c_char * length).from_address(address)
        view = memoryview(data).cast("B")
        done = 0
        while done < length:
            done += os.pwrite(fd, view[done:], offset + done)


def read_files(reads: bytes, jobs: bytes, threads: int) -> bytes:
    """Read files from several threads, and copy and sum the bytes: `reads` has records of 6 int64, (descriptor, offset,
    length, bytes needed, first job, jobs); `jobs` has those of `copy_digest`, with sources as offsets into the bytes
    read.

    Returns 8 bytes for each read, the number of bytes read, then 16 for each job: zeros if too little was read.
    """
    listed = list(_records(jobs, "<16q"))
    counts, sums = bytearray(), bytearray(16 * len(listed))
    for fd, offset, length, needed, first, count in _records(reads, "<6q"):
        if first + count > len(listed):
            raise ValueError("a read names jobs that do not exist")
        with mmap.mmap(-1, max(length, 1)) as buffer:
            done = 0
            while done < length:
                got = os.preadv(fd, [memoryview(buffer)[done:length]], offset + done)
                done += got
                if got == 0 or got % 4096:
                    break
            counts += struct.pack("<q", done)
            if done >= needed:
                anchor = ctypes.c_char.from_buffer(buffer)
                base = ctypes.addressof(anchor)
                moved = [(base + job[0], *job[1:]) for job in listed[first : first + count]]
                table = b"".join(_JOB.pack(*job) for job in moved)
                sums[16 * first : 16 * (first + count)] = copy_digest(table, 1, 0)
                del anchor
    return bytes(counts + sums)


def _records(table: bytes, form: str) -> Iterator[tuple[int, ...]]:
    record = struct.Struct(form)
    if len(table) % record.size:
        raise ValueError(f"a record has {record.size} bytes")
    return record.iter_unpack(table)


_JOB = struct.Struct("<16q")
_WORDS = 1024


def _runs(job: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """Yield source, destination and logical position of each contiguous run of a job."""
    for index in product(*map(range, job[4:7])):

        def at(start: int, strides: int, index: tuple[int, ...] = index) -> int:
            return start + sum(i * stride for i, stride in zip(index, job[strides : strides + 3], strict=True))

        yield at(job[0], 7), at(job[1], 10) if job[1] else 0, at(job[2], 13)


def _mix(seed: int) -> int:
    z = (seed + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


@functools.cache
def _word_keys(set_: int) -> tuple[int, ...]:
    return tuple((_mix((set_ << 32) | i) >> 32) | 1 for i in range(_WORDS))


def _run_sums(data: bytes, logical: int) -> tuple[int, int]:
    """Return the two sums of contiguous bytes that begin at byte `logical` of the tensor."""
    import numpy as np  # Only processes that move tensors pay for it.

    before = logical % 4
    padded = bytes(before) + data + bytes(-(before + len(data)) % 4)
    words = np.frombuffer(padded, "<u4").astype(np.uint64)
    numbers = np.arange(len(words), dtype=np.int64) + logical // 4
    first = int(numbers[0]) // _WORDS if len(words) else 0
    starts = np.flatnonzero(np.diff(numbers // _WORDS, prepend=first - 1))
    sums: list[int] = []
    for set_ in (0, 1):
        products = words * np.array(_word_keys(set_), np.uint64)[numbers % _WORDS]
        inner: list[int] = np.add.reduceat(products, starts, dtype=np.uint64).tolist() if len(words) else []
        sums.append(sum(s * (_mix(_mix(first + i) ^ (set_ + 1)) | 1) for i, s in enumerate(inner)) % 2**64)
    return sums[0], sums[1]


def run_collective(
    segment: int,
    rank: int,
    head: bytes,
    sends: Sequence[tuple[int, int]],
    receives: Sequence[tuple[int, int]],
    timeout_s: float,
) -> int:
    """Run the collective that `head` describes; returns 0 or why it failed: 1 abort, 2 mismatch, 3 deadline."""
    return _exchange.run_collective(segment, rank, head, sends, receives, timeout_s)


def abort_segment(segment: int, code: int) -> bool:
    """End every wait in a segment, now and later, for the reason `code`; False if it was aborted before."""
    return _exchange.SegmentView(segment, 0).abort(code)


_EXPONENTS = (("<u4", 0x7F800000), ("<u8", 0x7FF0000000000000), ("<u2", 0x7C00), ("<u2", 0x7F80))


def are_finite(parts: Sequence[tuple[int, int]], element: int) -> bool:
    """Return whether no number in these pieces of memory, of addresses and bytes, is infinite or not a number.

    Elements are 0 float32, 1 float64, 2 float16, 3 bfloat16. The caller keeps the memory alive.
    """
    import numpy as np

    if not 0 <= element < len(_EXPONENTS):
        raise ValueError("no such floating point element")
    kind, exponent = _EXPONENTS[element]
    if any(length % np.dtype(kind).itemsize for _, length in parts):
        raise ValueError("a piece has a part of an element")
    pieces = (np.frombuffer(ctypes.string_at(*part), kind) for part in parts)
    return not any(bool((piece & exponent == exponent).any()) for piece in pieces)


_recording = threading.RLock()  # Re-entrant: a signal handler may record, too.
_lanes: dict[int, int] = {}


def record_span(ring: int, what: int, argument: int, step: int) -> None:
    """Write a record to the ring of spans at address `ring`: `what` is name and kind; see `argosy.observe.spans`."""
    with _recording:
        header = (ctypes.c_uint64 * 4).from_address(ring)
        capacity, head = max(header[2], 1), header[3]
        record = (ctypes.c_uint64 * 4).from_address(ring + 4096 + head % capacity * 32)
        lane = _lanes.setdefault(threading.get_ident(), min(len(_lanes), 0xFFFF))
        record[3] = 0
        record[0], record[1], record[2] = time.monotonic_ns(), what | lane << 40, argument
        record[3] = (head + 1) & 0xFFFFFFFF | step << 32
        header[3] = head + 1
