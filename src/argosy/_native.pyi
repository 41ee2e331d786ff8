"""What the Rust extension offers; `_reference` has the same functions in Python."""

from collections.abc import Sequence

def punch_hole(fd: int, offset: int, length: int) -> None:
    """Give back the disk blocks of `length` bytes at `offset`; they read as zeros, the file's size stays."""

def pidfd_exit_status(pidfd: int) -> int | None:
    """The wait status of the process behind `pidfd`, whoever reaped it; None if the kernel cannot tell."""

def copy_digest(table: bytes, threads: int, progress: int) -> bytes:
    """Copy strided boxes between addresses and return the digest sums of each: 16 bytes per record of `table`.

    A record is 16 little-endian int64: source, destination (0: only sum), logical byte, bytes per run, three counts,
    then three strides each of source, destination and logical position. The caller keeps the memory alive.
    If `progress` is an address, the number of complete records is kept there (uint64): one thread goes in their order.
    """

def write_files(table: bytes, threads: int) -> None:
    """Write memory to files from several threads: records of 4 int64, (descriptor, address, offset, length)."""

def read_files(reads: bytes, jobs: bytes, sends: bytes, threads: int) -> bytes:
    """Read files from several threads, and copy and sum what was read: `reads` has records of 8 int64, (descriptor,
    offset, length, bytes needed, first job, jobs, first send, sends); `jobs` those of `copy_digest` and `sends` those
    of `write_memory`, sources counted from what was read.

    Returns 8 bytes for each read, how much it gave, then 16 for each job: zeros where a read gave too little.
    """

def write_memory(table: bytes) -> None:
    """Copy boxes into the memory of other processes: records of 20 int64, (process, descriptor of it, address there of
    its gate, address here of a count), then those of `copy_digest`, whose destination is an address of that process.
    The count is of threads that write just now. One that has ended is an OSError (ESRCH), one whose gate is not 1 is
    one too (ECANCELED)."""

def read_memory(pid: int, address: int, length: int) -> bytes:
    """`length` bytes at `address` of process `pid`."""

def run_collective(
    segment: int,
    rank: int,
    head: bytes,
    sends: Sequence[tuple[int, int]],
    receives: Sequence[tuple[int, int]],
    timeout_s: float,
) -> int:
    """Take part in the collective that `head` describes; 0, or how it broke: 1 abort, 2 mismatch, 3 deadline."""

def abort_segment(segment: int, code: int) -> bool:
    """Break every wait in a segment, now and later, for the reason `code`; false if it was broken before."""
