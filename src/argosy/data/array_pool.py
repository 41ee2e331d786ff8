"""Memory for batches that are made in the training process, reused as soon as the user drops a batch.

Without a pool, the allocator would take large blocks from the kernel and return them for each batch, which costs more
than filling them.
"""

import math
import weakref
from typing import Any, cast

import numpy as np
from numpy.typing import DTypeLike

from argosy.data.collate import Array

POOLED_BYTES_MIN = 1 << 16
BLOCKS_MAX = 16
_USUAL_BYTES = 16 << 20


def keep_heap() -> None:
    """Let the allocator keep the memory of samples, instead of taking it from the kernel for each of them.

    When a large block is freed, glibc raises its threshold: blocks up to that size then come from the heap, which
    keeps twice as much. The block is never touched.
    """
    np.empty(_USUAL_BYTES, np.uint8)


class ArrayPool:
    """Makes arrays; the memory of an array is reused when nothing refers to it."""

    def __init__(self) -> None:
        self._free: list[Array] = []

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        kind = np.dtype(dtype)
        size = math.prod(shape) * kind.itemsize
        if size < POOLED_BYTES_MIN:
            return np.empty(shape, kind)
        block = self._take(size)
        # All views refer to `whole` through the memoryview, and it is freed with the last of them.
        whole: Array = np.frombuffer(cast(Any, block), np.uint8, size)
        weakref.finalize(whole, self._give_back, block).atexit = False
        return np.frombuffer(memoryview(cast(Any, whole)), kind).reshape(shape)

    def _take(self, size: int) -> Array:
        for place, block in enumerate(self._free):
            if size <= block.nbytes <= 2 * size:
                return self._free.pop(place)
        return np.empty(size, np.uint8)

    def _give_back(self, block: Array) -> None:
        self._free.append(block)
        del self._free[:-BLOCKS_MAX]
