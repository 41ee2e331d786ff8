"""Large buffers between processes of one host: memory files, passed as descriptors and reused.

The sender copies into a segment once, for any number of receivers. A receiver maps it privately: it may write to its
copy, and nobody else sees that. Segments are reused because new memory costs many times more than touched memory.

S1  A segment is filled again only after every receiver has released it or closed its link.
S2  Nothing depends on the release: a segment that is never released is left to its receivers.
"""

import contextlib
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Sequence

SEGMENT_MIN = 128 << 10
"""Buffers smaller than this go through the socket."""
IDLE_BYTES_MAX = 1 << 30
LENT_MAX = 64
_ALIGN = 64
_ROUND = 1 << 20


class MemorySegment:
    """A memory file and the sender's mapping of it."""

    def __init__(self, number: int, size: int) -> None:
        self.number, self.size = number, size
        self.fd = os.memfd_create("argosy-segment", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, size)
        self.map = mmap.mmap(self.fd, size)
        self.lent = 0

    def close(self) -> None:
        os.close(self.fd)
        self.map.close()


class SegmentPool:
    """The segments that this process fills. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: dict[int, MemorySegment] = {}
        self._count = 0

    def fill(self, buffers: Sequence[memoryview], receivers: int) -> MemorySegment:
        """Copy the buffers into one segment, which then belongs to that many receivers.

        Raises:
            OSError: no memory or descriptor is left.
        """
        import numpy as np

        offsets, size = layout_buffers([buffer.nbytes for buffer in buffers])
        segment = self._take(size, receivers)
        target = np.frombuffer(segment.map, dtype=np.uint8)
        for offset, buffer in zip(offsets, buffers, strict=True):
            source = np.frombuffer(buffer, dtype=np.uint8)
            np.copyto(target[offset : offset + source.size], source)  # Without the GIL.
        return segment

    def returned(self, number: int) -> None:
        """One receiver has released a segment (S1)."""
        with self._lock:
            segment = self._all.get(number)
            if segment is not None and segment.lent > 0:
                segment.lent -= 1
            self._trim()

    def _take(self, size: int, receivers: int) -> MemorySegment:
        with self._lock:
            fitting = [s for s in self._all.values() if not s.lent and size <= s.size <= 4 * size + _ROUND]
            if fitting:
                segment = self._all.pop(min(fitting, key=lambda s: s.size).number)
            else:
                self._count += 1
                segment = MemorySegment(self._count, -(-size // _ROUND) * _ROUND)
            self._all[segment.number] = segment  # Least recently used first.
            segment.lent = receivers
            self._trim()
            return segment

    def _trim(self) -> None:
        """Drop the oldest idle segments beyond IDLE_BYTES_MAX, and the oldest lent ones beyond LENT_MAX (S2)."""
        idle = [s for s in self._all.values() if not s.lent]
        while idle and sum(s.size for s in idle) > IDLE_BYTES_MAX:
            self._forget(idle.pop(0))
        lent = [s for s in self._all.values() if s.lent]
        for segment in lent[: max(0, len(lent) - LENT_MAX)]:
            self._forget(segment)

    def _forget(self, segment: MemorySegment) -> None:
        del self._all[segment.number]
        with contextlib.suppress(BufferError):  # It is being filled; the mapping is freed with its last user.
            segment.close()


own_segments = SegmentPool()


def layout_buffers(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return the offsets of buffers of these sizes in a segment, and the length that they need."""
    offsets: list[int] = []
    end = 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // _ALIGN) * _ALIGN
    return offsets, end


def map_received(fd: int, sizes: Sequence[int], on_free: Callable[[], None]) -> list[memoryview]:
    """Map a received segment as buffers of these sizes; closes `fd`.

    `on_free` is called when nothing uses them any more, on whichever thread that happens: it must not block.
    """
    offsets, size = layout_buffers(sizes)
    try:
        mapped = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(fd)
    weakref.finalize(mapped, on_free).atexit = False
    view = memoryview(mapped)
    return [view[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)]
