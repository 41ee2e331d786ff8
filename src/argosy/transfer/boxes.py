"""Boxes in the index space of a tensor: intersect, subtract, cut, and how a box lies in memory. Pure."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod

import msgspec

CHUNK_BYTES = 8 << 20
"""Tensors are copied, verified and stored in chunks of at most so many bytes."""


class Box(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """The cells `start[d] <= i[d] < start[d] + shape[d]`; a 0-d box has one cell."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def stop(self) -> tuple[int, ...]:
        return tuple(a + n for a, n in zip(self.start, self.shape, strict=True))

    @property
    def cells(self) -> int:
        return prod(self.shape)

    def __and__(self, other: "Box") -> "Box | None":
        """What both have, or None where they have no cell in common."""
        if self.start == other.start and self.shape == other.shape:  # As most tensors are saved and loaded.
            return None if 0 in self.shape else self
        start: list[int] = []
        shape: list[int] = []
        for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True):
            low = a if a > b else b
            size = min(a + n, b + m) - low
            if size <= 0:
                return None  # Most pairs end here, in the first dimension.
            start.append(low)
            shape.append(size)
        return Box(tuple(start), tuple(shape))

    def __sub__(self, other: "Box") -> "list[Box]":
        """The cells of this box that `other` has not, as disjoint boxes in order."""
        common = self & other
        if common is self:
            return []
        if common is None:
            return [self] if self.cells else []
        parts: list[Box] = []
        start, shape = list(self.start), list(self.shape)
        for d, (low, size) in enumerate(zip(common.start, common.shape, strict=True)):
            before, after = low - start[d], start[d] + shape[d] - low - size
            if before:
                parts.append(Box(tuple(start), (*shape[:d], before, *shape[d + 1 :])))
            if after:
                parts.append(Box((*start[:d], low + size, *start[d + 1 :]), (*shape[:d], after, *shape[d + 1 :])))
            start[d], shape[d] = low, size
        return sorted(parts)

    def __str__(self) -> str:
        return "[" + ",".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)) + "]"


def whole(shape: Sequence[int]) -> Box:
    """The box of all cells."""
    return Box((0,) * len(shape), tuple(shape))


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in cells of a row-major tensor."""
    return _strides(tuple(shape))


@lru_cache(1 << 14)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def flat_boxes(shape: Sequence[int], first: int, last: int) -> list[Box]:
    """The cells `first <= i < last` of the row-major order as at most 2 n - 1 boxes, in that order."""
    if first >= last:
        return []
    if len(shape) <= 1:
        return [Box((first,) if shape else (), (last - first,) if shape else ())]
    inner = prod(shape[1:])
    row, start = divmod(first, inner)
    row_last, stop = divmod(last, inner)
    if row == row_last:
        return _in_row(row, flat_boxes(shape[1:], start, stop))
    boxes: list[Box] = []
    if start:
        boxes += _in_row(row, flat_boxes(shape[1:], start, inner))
        row += 1
    if row < row_last:
        boxes.append(Box((row, *[0] * (len(shape) - 1)), (row_last - row, *shape[1:])))
    if stop:
        boxes += _in_row(row_last, flat_boxes(shape[1:], 0, stop))
    return boxes


def _in_row(row: int, boxes: list[Box]) -> list[Box]:
    return [Box((row, *box.start), (1, *box.shape)) for box in boxes]


def cut(box: Box, cells_max: int) -> Iterator[Box]:
    """Cut a box into boxes of at most `cells_max` cells (one at least) that follow each other in row-major order."""
    if box.cells <= cells_max or not box.shape:
        if box.cells or not box.shape:
            yield box
        return
    inner = prod(box.shape[1:])
    if inner > cells_max:
        for row in range(box.shape[0]):
            for part in cut(Box(box.start[1:], box.shape[1:]), cells_max):
                yield Box((box.start[0] + row, *part.start), (1, *part.shape))
        return
    rows = max(1, cells_max // inner)
    for row in range(0, box.shape[0], rows):
        size = min(rows, box.shape[0] - row)
        yield Box((box.start[0] + row, *box.start[1:]), (size, *box.shape[1:]))


def has_shared_cells(shape: Sequence[int], strides: Sequence[int], cell: int = 1) -> bool:
    """Whether two cells may share memory, as those of an expanded tensor do; strides in the unit of `cell`."""
    end = cell
    for stride, size in sorted((abs(stride), size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if not size or stride < end:
            return bool(size)
        end += stride * (size - 1)
    return False
