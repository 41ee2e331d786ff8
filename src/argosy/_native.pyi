"""What the Rust extension offers; `_reference` has the same functions in Python."""

def punch_hole(fd: int, offset: int, length: int) -> None:
    """Give back the disk blocks of `length` bytes at `offset`; they read as zeros, the file's size stays."""

def pidfd_exit_status(pidfd: int) -> int | None:
    """The wait status of the process behind `pidfd`, whoever reaped it; None if the kernel cannot tell."""
