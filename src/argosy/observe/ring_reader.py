"""Read a ring of spans as numpy columns, from where the last reading ended. The rank may run, be stopped or dead."""

import mmap
import os

import numpy as np

from argosy.observe.columns import Columns
from argosy.observe.spans import HEADER, HEADER_BYTES, MAGIC, NAMES_MAX, RECORD_BYTES


class RingReader:
    """One ring file.

    Raises:
        OSError: the file cannot be mapped.
        ValueError: the file is not a ring of spans.
    """

    def __init__(self, path: str | os.PathLike[str], first: int = 0) -> None:
        with open(path, "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        words = HEADER.unpack_from(self._map) if len(self._map) >= HEADER_BYTES else (0,) * 7
        magic, self.pid, self._capacity, _, _, self.wall, self.monotonic = words
        if magic != MAGIC or not 0 < self._capacity * RECORD_BYTES <= len(self._map) - HEADER_BYTES:
            raise ValueError(f"not a ring of spans: {os.fspath(path)}")
        self._records = np.frombuffer(self._map, "<u8", self._capacity * 4, HEADER_BYTES).reshape(-1, 4)
        self.next = first
        self.lost = 0
        """Records that were overwritten before they were read."""

    def take(self) -> Columns | None:
        """Return the records since the last call, or None if there are none."""
        head = self._head()
        first = max(self.next, head - self._capacity + 1)
        if head <= first:
            return None
        numbers = np.arange(first, head)
        copied = self._records[numbers % self._capacity]  # A copy.
        oldest = self._head() - self._capacity + 1
        whole = ((copied[:, 3] & 0xFFFFFFFF) == ((numbers + 1) & 0xFFFFFFFF)) & (numbers >= oldest)
        self.lost += first - self.next + int(np.count_nonzero(~whole))
        self.next = head
        kept = copied[whole]
        if not len(kept):
            return None
        return {
            "time": kept[:, 0].astype("<i8"),
            "name": (kept[:, 1] & 0xFFFFFFFF).astype("<u2"),
            "kind": (kept[:, 1] >> 32 & 0xFF).astype("u1"),
            "lane": (kept[:, 1] >> 40 & 0xFFFF).astype("<u2"),
            "argument": kept[:, 2],
            "step": (kept[:, 3] >> 32).astype("<u4"),
        }

    def names(self) -> list[str]:
        """The names by number."""
        count = min(HEADER.unpack_from(self._map)[4], NAMES_MAX)
        raw = [self._map[256 + number * 32 : 288 + number * 32] for number in range(count)]
        return [each.rstrip(b"\0").decode(errors="replace") for each in raw]

    def _head(self) -> int:
        return int(HEADER.unpack_from(self._map)[3])
