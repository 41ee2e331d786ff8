"""The order of the samples of a source: maps a position to an epoch and an index. Pure.

Positions count samples from the start of the training, across epochs; ranks, workers and batches play no part.

O1  In every epoch each index comes exactly once.
O2  The result for a position depends on (shuffle, seed, length) alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from argosy.core import ConfigError
from argosy.data.permute import Indices, Permutation, derive_key


@dataclass(frozen=True, slots=True)
class Shuffle:
    """How an epoch is shuffled: `Shuffle.full()`, `Shuffle.blocks(size, window)` or `Shuffle.none()`."""

    block: int = 0
    """Samples per block; 0: no shuffle, 1: full shuffle."""
    window: int = 1
    """Blocks whose samples are shuffled together."""

    @classmethod
    def full(cls) -> "Shuffle":
        """Shuffle all samples: for sources with fast random access."""
        return cls(1)

    @classmethod
    def none(cls) -> "Shuffle":
        """The source's own order."""
        return cls(0)

    @classmethod
    def blocks(cls, size: int, window: int = 8) -> "Shuffle":
        """Shuffle the blocks of `size` neighbours, and the samples among `window` blocks.

        For sources that read neighbours together: the rows of a Parquet row group, the lines of an object.
        """
        if size < 1 or window < 1:
            raise ConfigError(f"size and window must be at least 1: size {size}, window {window}")
        return cls(size, window) if size > 1 else cls(1)

    def at(self, epoch_key: int, length: int, offsets: Indices) -> Indices:
        """Return the indices at `offsets` (0..length-1) of the epoch with this key."""
        if self.block == 0:
            return offsets.copy()
        if self.block == 1:
            return _permutation(length, epoch_key).at(offsets)
        return _Blocks(self, epoch_key, length).at(offsets)


@lru_cache(maxsize=256)
def _permutation(size: int, key: int) -> Permutation:
    return Permutation(size, key)


class _Run(NamedTuple):
    """Consecutive slots of `size` samples, of which slot `short` (if any) lacks `lack` samples."""

    size: int
    short: int
    lack: int

    def start(self, slot: int) -> int:
        return slot * self.size - (self.lack if slot > self.short else 0)

    def locate(self, offsets: Indices) -> tuple[Indices, Indices]:
        """Return the slot of each offset, and its place in the slot."""
        end_of_short = (self.short + 1) * self.size - self.lack
        shifted = np.where(offsets >= end_of_short, offsets + self.lack, offsets)
        return shifted // self.size, shifted % self.size


class _Blocks:
    """One epoch in blocks; the last block of the source may be short, and comes at a random place."""

    def __init__(self, shuffle: Shuffle, key: int, length: int) -> None:
        self.size, self.window, self.key = shuffle.block, shuffle.window, key
        self.count = -(-length // self.size)
        self.length = length
        self.blocks = _permutation(self.count, key)
        lack = self.count * self.size - length
        place = int(self.blocks.find(np.array([self.count - 1]))[0]) if lack else self.count
        self.run = _Run(self.size, place, lack)
        self.windows = _Run(self.size * self.window, place // self.window if lack else self.count, lack)

    def at(self, offsets: Indices) -> Indices:
        numbers, _ = self.windows.locate(offsets)
        result = np.empty_like(offsets)
        for number in np.unique(numbers):
            chosen = numbers == number
            result[chosen] = self._in_window(int(number), offsets[chosen])
        return result

    def _in_window(self, number: int, offsets: Indices) -> Indices:
        start = self.windows.start(number)
        end = min(self.windows.start(number + 1), self.length)
        mixed = start + _permutation(end - start, derive_key(self.key, number)).at(offsets - start)
        slots, places = self.run.locate(mixed)
        return self.blocks.at(slots) * self.size + places


class OrderSegment(NamedTuple):
    """From `position` on, which begins epoch `epoch`, epochs have `length` samples."""

    position: int
    epoch: int
    length: int


class Order:
    """The endless order of one source; a change of its length adds a segment."""

    def __init__(self, length: int, shuffle: Shuffle, seed: int) -> None:
        if length < 1:
            raise ConfigError(
                "the source is empty", hint="check that its path or pattern matches files, and that they hold samples"
            )
        self.shuffle, self.seed = shuffle, seed
        self.segments: list[OrderSegment] = [OrderSegment(0, 0, length)]

    @property
    def length(self) -> int:
        """Samples per epoch, in the newest segment."""
        return self.segments[-1].length

    def at(self, positions: Indices) -> tuple[Indices, Indices]:
        """Return the epochs and the indices at `positions`."""
        epochs, offsets, lengths = self._unroll(positions)
        indices = np.empty_like(positions)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            length = int(lengths[chosen][0])
            indices[chosen] = self.shuffle.at(derive_key(self.seed, int(epoch)), length, offsets[chosen])
        return epochs, indices

    def epoch_of(self, position: int) -> int:
        return int(self._unroll(np.array([position]))[0][0])

    def end_of(self, epochs: int) -> int:
        """The position at which `epochs` epochs are over."""
        last = next(s for s in reversed(self.segments) if s.epoch < epochs or s is self.segments[0])
        return last.position + (epochs - last.epoch) * last.length

    def change_length(self, length: int, position: int) -> None:
        """Let epochs that begin after `position` have `length` samples; the current one keeps its length."""
        epochs, offsets, lengths = self._unroll(np.array([position]))
        rest = (int(lengths[0]) - int(offsets[0])) % int(lengths[0])
        begins = OrderSegment(position + rest, int(epochs[0]) + (1 if rest else 0), length)
        kept = [segment for segment in self.segments if segment.position < begins.position]
        self.segments = _current([*kept, begins], position)

    def _unroll(self, positions: Indices) -> tuple[Indices, Indices, Indices]:
        """Return the epoch of each position, its offset there, and that epoch's length."""
        if len(self.segments) == 1:
            first, epoch, length = self.segments[0]
            epochs, offsets = np.divmod(positions - first, length)
            return epochs + epoch, offsets, np.broadcast_to(np.int64(length), positions.shape)
        table = np.array(self.segments, dtype=np.int64)
        row = table[np.searchsorted(table[:, 0], positions, side="right") - 1]
        epochs, offsets = np.divmod(positions - row[:, 0], row[:, 2])
        return epochs + row[:, 1], offsets, row[:, 2]


def _current(segments: Sequence[OrderSegment], position: int) -> list[OrderSegment]:
    """Drop segments that ended before `position`."""
    ends = [segment.position for segment in segments[1:]]
    return [segment for segment, end in zip(segments, [*ends, position + 1], strict=True) if end > position]
