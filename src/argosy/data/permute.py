"""A keyed permutation of 0..size-1 that needs no memory: any element of any epoch's order is computed directly.

Six Feistel rounds over the smallest power of two that holds `size`, and cycle walking: a value outside the range is
permuted again until it is inside.

F1  For every size from 1 to 2^62 and every key this is a bijection.
F2  The order of a (size, key) never changes: checkpoints rely on it.
"""

import hashlib
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Indices: TypeAlias = NDArray[np.int64]
_Words: TypeAlias = NDArray[np.uint64]
_Rounds: TypeAlias = Callable[[_Words], _Words]

ROUNDS = 6
SIZE_MAX = 1 << 62
_CHUNK = 1 << 13
"""Elements computed at a time, so that the intermediate arrays stay in the cache."""
_MIX = np.uint64(0x9E3779B97F4A7C15)
_MIX_AGAIN = np.uint64(0xD6E8FEB86659FD93)
_SHIFT = np.uint64(32)


def derive_key(*parts: int | str) -> int:
    """Return 64 bits that depend on every part: (seed, epoch), (seed, epoch, window), and so on."""
    text = "/".join(f"{type(part).__name__[0]}{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class Permutation:
    """A bijection of 0..size-1, the same for the same size and key."""

    def __init__(self, size: int, key: int) -> None:
        if not 1 <= size <= SIZE_MAX:
            raise ValueError(f"a permutation has 1 to 2^62 elements: {size}")
        self.size = size
        bits = max((size - 1).bit_length(), 2)
        self._low_bits = np.uint64(bits // 2)
        self._low_mask = np.uint64((1 << (bits // 2)) - 1)
        self._high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
        digest = hashlib.blake2b(key.to_bytes(8, "little"), digest_size=8 * ROUNDS).digest()
        self._keys = [np.uint64(int.from_bytes(digest[8 * i : 8 * i + 8], "little")) for i in range(ROUNDS)]

    def at(self, offsets: Indices) -> Indices:
        """Return the elements at `offsets`, each of which is in 0..size-1."""
        return self._apply(offsets, self._forward)

    def find(self, elements: Indices) -> Indices:
        """Return the offsets at which `elements` are: the inverse of `at`."""
        return self._apply(elements, self._backward)

    def _apply(self, values: Indices, rounds: _Rounds) -> Indices:
        flat = np.ascontiguousarray(values, dtype=np.int64).reshape(-1).view(np.uint64)
        result = np.empty(flat.shape, np.uint64)
        for start in range(0, flat.size, _CHUNK):
            result[start : start + _CHUNK] = self._walk(flat[start : start + _CHUNK], rounds)
        return result.view(np.int64).reshape(np.shape(values))

    def _walk(self, values: _Words, rounds: _Rounds) -> _Words:
        """Permute the larger domain until every value is inside; each walk ends, because it returns to its start."""
        size = np.uint64(self.size)
        values = rounds(values)
        outside = np.flatnonzero(values >= size)
        while outside.size:
            again = rounds(values[outside])
            values[outside] = again
            outside = outside[again >= size]
        return values

    def _forward(self, values: _Words) -> _Words:
        high, low = values >> self._low_bits, values & self._low_mask
        for number in range(0, ROUNDS, 2):
            high ^= self._scramble(low, number) & self._high_mask
            low ^= self._scramble(high, number + 1) & self._low_mask
        return (high << self._low_bits) | low

    def _backward(self, values: _Words) -> _Words:
        high, low = values >> self._low_bits, values & self._low_mask
        for number in range(ROUNDS - 2, -1, -2):
            low ^= self._scramble(high, number + 1) & self._low_mask
            high ^= self._scramble(low, number) & self._high_mask
        return (high << self._low_bits) | low

    def _scramble(self, half: _Words, number: int) -> _Words:
        mixed = half ^ self._keys[number]
        mixed *= _MIX
        mixed ^= mixed >> _SHIFT
        mixed *= _MIX_AGAIN
        mixed >>= _SHIFT
        return mixed
