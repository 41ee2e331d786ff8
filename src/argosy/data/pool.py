"""Memory for batches that are made in the training process: used again as soon as the user has dropped them.

The allocator gives large blocks back to the kernel and takes them anew for each batch, which costs more than
the copy that fills them.
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
    """Let the allocator keep what samples are made in, instead of taking it from the kernel for each of them.

    glibc takes the size of a large block that is freed for usual: blocks up to it then come from the heap, and twice
    as much stays there. The block is never touched.
    """
    np.empty(_USUAL_BYTES, np.uint8)


class Pool:
    """Makes arrays; a block serves again when nothing refers to the array that was made in it."""

    def __init__(self) -> None:
        self._free: list[Array] = []

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        kind = np.dtype(dtype)
        size = math.prod(shape) * kind.itemsize
        if size < POOLED_BYTES_MIN:
            return np.empty(shape, kind)
        block = self._take(size)
        # All views hold `whole` through the memoryview, and it dies with the last of them.
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
