"""The functions of the Rust extension; `_reference` has the same functions in Python."""

from collections.abc import Sequence

def punch_hole(fd: int, offset: int, length: int) -> None:
    """Free the disk blocks of `length` bytes at `offset`; they read as zeros, and the file's size stays."""

def pidfd_exit_status(pidfd: int) -> int | None:
    """Return the wait status of the process behind `pidfd`, even if it was reaped; None if unknown."""

def copy_digest(table: bytes, threads: int, progress: int) -> bytes:
    """Copy strided boxes between addresses and return the digest sums of each: 16 bytes per record of `table`.

    A record is 16 little-endian int64: source, destination (0: only sum), logical byte, bytes per run, three counts,
    then three strides each of source, destination and logical position. The caller keeps the memory alive.
    If `progress` is an address, the number of complete records is stored there (uint64); one thread keeps their order.
    """

def write_files(table: bytes, threads: int) -> None:
    """Write memory to files from several threads: records of 4 int64, (descriptor, address, offset, length)."""

def read_files(reads: bytes, jobs: bytes, threads: int) -> bytes:
    """Read files from several threads, and copy and sum the bytes: `reads` has records of 6 int64, (descriptor, offset,
    length, bytes needed, first job, jobs); `jobs` has those of `copy_digest`, with sources as offsets into the bytes
    read.

    Returns 8 bytes for each read, the number of bytes read, then 16 for each job: zeros if too little was read.
    """

def run_collective(
    segment: int,
    rank: int,
    head: bytes,
    sends: Sequence[tuple[int, int]],
    receives: Sequence[tuple[int, int]],
    timeout_s: float,
) -> int:
    """Run the collective that `head` describes; returns 0 or why it failed: 1 abort, 2 mismatch, 3 deadline."""

def abort_segment(segment: int, code: int) -> bool:
    """End every wait in a segment, now and later, for the reason `code`; False if it was aborted before."""

def are_finite(parts: Sequence[tuple[int, int]], element: int) -> bool:
    """Return whether no number in these pieces of memory, of addresses and bytes, is infinite or not a number.

    Elements are 0 float32, 1 float64, 2 float16, 3 bfloat16. The caller keeps the memory alive.
    """

def record_span(ring: int, what: int, argument: int, step: int) -> None:
    """Write a record to the ring of spans at address `ring`: `what` is name and kind; see `argosy.observe.spans`."""
