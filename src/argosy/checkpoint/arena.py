"""Shared memory that holds one snapshot, with a sequence number behind it: odd while somebody writes."""

import ctypes
import mmap
import os
from contextlib import suppress

from argosy.checkpoint.format import BLOCK


def room_of(size: int) -> int:
    """The bytes of memory that an arena for `size` bytes takes."""
    return max(BLOCK, -(-size // BLOCK) * BLOCK) + BLOCK


class Arena:
    """Memory that is mapped and touched once, then used again and again; `fd` may come from a keeper, which lent it.

    A1  The number in the last block is odd while a snapshot is being made, so half a snapshot is never taken for one.
    """

    def __init__(self, size: int, fd: int | None = None, slot: int = 0) -> None:
        self.slot, self.fd = slot, fd
        if fd is None:
            # Memory that no other process will see; its first touch is cheaper than that of a descriptor's.
            self.map = mmap.mmap(-1, room_of(size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError, AttributeError):  # A disk takes large pages at up to three times the speed.
                self.map.madvise(mmap.MADV_HUGEPAGE)
        else:
            # Whom it was lent touches it all at once; the keeper, which has others to answer, when it is read.
            populate = getattr(mmap, "MAP_POPULATE", 0) if slot else 0
            self.map = mmap.mmap(fd, os.fstat(fd).st_size, flags=mmap.MAP_SHARED | populate)
        self.size = len(self.map) - BLOCK
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    @property
    def view(self) -> memoryview:
        return memoryview(self.map)

    def begin(self) -> None:
        """From here on the content is nobody's."""
        if not self.sequence % 2:
            self._set(self.sequence + 1)

    def finish(self) -> int:
        """The content is a whole snapshot; returns its number."""
        self._set(self.sequence + 1)
        return self.sequence

    @property
    def sequence(self) -> int:
        return int.from_bytes(self.map[self.size : self.size + 8], "little")

    def _set(self, number: int) -> None:
        self.map[self.size : self.size + 8] = number.to_bytes(8, "little")

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
        # Views may live on in a writer; the mapping goes with the last of them.
        del self.map


def new_memory(size: int) -> int:
    """A descriptor of so much shared memory that has no name and is gone with its last holder."""
    fd = os.memfd_create("argosy-arena", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
    except OSError:
        os.close(fd)
        raise
    return fd


def memory_of(data: bytes) -> int:
    """A descriptor of shared memory with this content."""
    fd = os.memfd_create("argosy-draft", os.MFD_CLOEXEC)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    return fd


def content_of(fd: int) -> bytes:
    """All bytes of such memory, from its start."""
    size = os.fstat(fd).st_size
    return os.pread(fd, size, 0) if size < 1 << 30 else b"".join(_parts(fd, size))


def _parts(fd: int, size: int) -> list[bytes]:
    return [os.pread(fd, 1 << 28, at) for at in range(0, size, 1 << 28)]
