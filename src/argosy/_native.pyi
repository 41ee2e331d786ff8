"""What the Rust extension offers; `_reference` has the same functions in Python."""

from collections.abc import Sequence

def punch_hole(fd: int, offset: int, length: int) -> None:
    """Give back the disk blocks of `length` bytes at `offset`; they read as zeros, the file's size stays."""

def pidfd_exit_status(pidfd: int) -> int | None:
    """The wait status of the process behind `pidfd`, whoever reaped it; None if the kernel cannot tell."""

def run_collective(
    segment: int,
    rank: int,
    head: bytes,
    sends: Sequence[tuple[int, int]],
    receives: Sequence[tuple[int, int]],
    timeout_s: float,
) -> int:
    """Take part in the collective that `head` describes; 0, or how it broke: 1 abort, 2 mismatch, 3 deadline."""
