"""Large buffers between processes of one host: memory files, passed as descriptors, kept warm and used again.

The sender copies into a segment once, whoever receives it. A receiver maps it privately: it may write to what it
got, and nobody else sees that. Memory that was touched before is many times cheaper than new memory, so a segment
that came back is the next one's.

S1  A segment is filled again only after every receiver let go of it or of its link.
S2  Nothing depends on segments coming back: one that does not is left to its receivers and forgotten.
"""

import mmap
import os
import threading
import weakref
from collections.abc import Callable, Sequence

SEGMENT_MIN = 128 << 10
"""Smaller buffers go through the socket."""
IDLE_BYTES_MAX = 1 << 30
LENT_MAX = 64
_ALIGN = 64
_ROUND = 1 << 20


class Segment:
    """One memory file and the sender's mapping of it."""

    def __init__(self, number: int, size: int) -> None:
        self.number, self.size = number, size
        self.fd = os.memfd_create("argosy-segment", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, size)
        self.map = mmap.mmap(self.fd, size)
        self.lent = 0

    def close(self) -> None:
        os.close(self.fd)
        self.map.close()


class Segments:
    """The segments that this process fills. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: dict[int, Segment] = {}
        self._count = 0

    def fill(self, buffers: Sequence[memoryview], receivers: int) -> Segment:
        """Copy the buffers into one segment, which then belongs to that many receivers.

        Raises:
            OSError: there is no memory or descriptor for one.
        """
        import numpy as np

        segment = self._take(extent([buffer.nbytes for buffer in buffers])[1], receivers)
        target = np.frombuffer(segment.map, dtype=np.uint8)
        for offset, buffer in zip(extent([b.nbytes for b in buffers])[0], buffers, strict=True):
            source = np.frombuffer(buffer, dtype=np.uint8)
            np.copyto(target[offset : offset + source.size], source)  # Without the interpreter's lock.
        return segment

    def returned(self, number: int) -> None:
        """One receiver has let go of a segment (S1)."""
        with self._lock:
            segment = self._all.get(number)
            if segment is not None and segment.lent > 0:
                segment.lent -= 1
            self._trim()

    def _take(self, size: int, receivers: int) -> Segment:
        with self._lock:
            fitting = [s for s in self._all.values() if not s.lent and size <= s.size <= 4 * size + _ROUND]
            if fitting:
                segment = self._all.pop(min(fitting, key=lambda s: s.size).number)
            else:
                self._count += 1
                segment = Segment(self._count, -(-size // _ROUND) * _ROUND)
            self._all[segment.number] = segment  # The last is the one that was used last.
            segment.lent = receivers
            self._trim()
            return segment

    def _trim(self) -> None:
        """Forget the oldest: of the idle beyond their bytes, of the lent beyond their number (S2)."""
        idle = [s for s in self._all.values() if not s.lent]
        while idle and sum(s.size for s in idle) > IDLE_BYTES_MAX:
            self._forget(idle.pop(0))
        lent = [s for s in self._all.values() if s.lent]
        for segment in lent[: max(0, len(lent) - LENT_MAX)]:
            self._forget(segment)

    def _forget(self, segment: Segment) -> None:
        del self._all[segment.number]
        try:
            segment.close()
        except BufferError:  # Being filled just now; its descriptor is closed, the mapping goes with its last user.
            return


ours = Segments()
"""Those that this process fills."""


def extent(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where buffers of these sizes lie in a segment, and how long it must be."""
    offsets: list[int] = []
    end = 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // _ALIGN) * _ALIGN
    return offsets, end


def borrow(fd: int, sizes: Sequence[int], on_free: Callable[[], None]) -> list[memoryview]:
    """Map a segment that was received, as buffers of these sizes; closes `fd`.

    `on_free` is called when nothing uses them any more, from wherever the last use ended: it must not block.
    """
    offsets, size = extent(sizes)
    try:
        mapped = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(fd)
    weakref.finalize(mapped, on_free).atexit = False
    view = memoryview(mapped)
    return [view[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)]
