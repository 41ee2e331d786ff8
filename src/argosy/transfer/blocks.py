"""Values quantised in blocks: a code for each cell, and for each `size` cells a scale. Pure.

B1  Where every cut falls on the border of a block of the whole tensor, in row-major order, blocks move as they are.
B2  Else each rank's part has blocks of its own, in the order of its memory (`Blocking.parts`): they are kept as they
    are, and move as they are to who has the same parts. For others they are quantised anew, if that is asked for.
"""

from collections.abc import Mapping
from math import isfinite
from typing import Any

import msgspec
import numpy as np

from argosy.core import ConfigError
from argosy.transfer.boxes import Box, flat_boxes, strides_of, whole
from argosy.transfer.layout import Layout, Piece, Range, flat

Indices = np.ndarray[Any, np.dtype[np.int64]]
BLOCKS_NOTE = "$blocks"
WRAPPED_NOTE = "$wrapped"
NOTES = (BLOCKS_NOTE, WRAPPED_NOTE)
"""Under which options of a unit it is stored how its blocks lie, and what its tensors were that consist of others."""


class UnalignedBlocks(ConfigError):
    """A cut falls inside a block of quantised values."""


class Blocks(msgspec.Struct, frozen=True):
    """How a tensor of scales goes with one of codes: a value is `book[code] * scale`, with one scale per `size` cells.

    `codes` is the key of the codes. `book` is the key of the tensor that has the value of each code, or these values
    themselves, beginning with that of the smallest code; empty if codes are numbers (float8). Who names no codes can
    have blocks moved, but not quantised anew.
    """

    size: int
    codes: str = ""
    book: str | tuple[float, ...] = ""

    def __post_init__(self) -> None:
        size: Any = self.size
        if not isinstance(size, int) or size < 1:
            raise ConfigError(f"a block has a number of cells above 0: {size!r}")
        if isinstance(self.book, tuple) and not all(map(isfinite, self.book)):
            raise ConfigError("a book has finite values")

    def has_all(self, itemsize: int) -> bool:
        """Whether its book has a value for each code of so many bytes."""
        return len(self.book) == 1 << 8 * itemsize

    def is_said(self, dtype: str) -> bool:
        """Whether there is a book, or codes are numbers."""
        return bool(self.book) or dtype.startswith("F")


class Spread(msgspec.Struct, frozen=True, array_like=True):
    """A box of a part, and where its cells lie in the part's memory."""

    box: Box
    offset: int
    strides: tuple[int, ...]


class Blocking(msgspec.Struct, frozen=True):
    """Where the blocks of a tensor of `shape` are: see B1 (no parts) and B2."""

    shape: tuple[int, ...]
    blocks: Blocks
    parts: tuple[tuple[Spread, ...], ...] = ()

    @property
    def size(self) -> int:
        return self.blocks.size

    @property
    def count(self) -> int:
        """How many blocks there are."""
        cells = [_cells(part) for part in self.parts] or [whole(self.shape).cells]
        return sum(-(-each // self.size) for each in cells)

    def is_as(self, other: "Blocking") -> bool:
        """Whether the same cells have the same scales."""
        return (self.shape, self.size, self.parts) == (other.shape, other.size, other.parts)

    def numbers(self, cells: Indices) -> Indices:
        """The number of the block, and so of the scale, of each of these cells of the row-major order."""
        if not self.parts:
            return cells // self.size
        found = np.full(len(cells), -1, np.int64)
        where = np.unravel_index(cells, self.shape)
        base = 0
        for part in self.parts:
            for spread in part:
                inside = found < 0
                for at, first, last in zip(where, spread.box.start, spread.box.stop, strict=True):
                    inside &= (at >= first) & (at < last)
                found[inside] = base + _local(spread, [at[inside] for at in where]) // self.size
            base += -(-_cells(part) // self.size)
        return found


def _local(spread: Spread, where: list[Indices]) -> Indices:
    """Where cells of a box lie in the part's memory."""
    steps = zip(where, spread.box.start, spread.strides, strict=True)
    return sum(((at - first) * stride for at, first, stride in steps), np.int64(spread.offset))  # type: ignore[return-value]


def _cells(part: tuple[Spread, ...]) -> int:
    return sum(spread.box.cells for spread in part)


def blocked(layout: Layout, block: int) -> Layout:
    """The layout of one value per `block` cells of a tensor that is cut as `layout`.

    Raises:
        UnalignedBlocks: a cut does not fall on the border of a block.
    """
    cells = whole(layout.shape).cells
    count = -(-cells // block)
    ranges: list[Range] = []
    for rank in layout.ranks:
        offset = 0
        for first, last in flat_ranges(layout, rank):
            if first % block or (last % block and last != cells):
                raise UnalignedBlocks(
                    f"blocks of {block} cells are cut at {first}:{last} of {cells} on rank {rank}",
                    hint="choose ranks or shard sizes that are multiples of the block",
                )
            size = -(-last // block) - first // block
            ranges.append(Range(rank, first // block, first // block + size, offset))
            offset += size
    return flat((count,), ranges)


def parted(layout: Layout, blocks: Blocks) -> tuple[Layout, Blocking]:
    """The layout of one value per block of each rank's own part (B2), and where these blocks are.

    Raises:
        UnalignedBlocks: a part lies in its memory among others'.
    """
    bases: dict[tuple[Spread, ...], tuple[int, int]] = {}
    ranges: list[Range] = []
    count = 0
    for rank in layout.ranks:
        part = tuple(Spread(piece.box, piece.offset, piece.strides) for piece in layout.held.get(rank, ()))
        if not part:
            continue
        if part not in bases:
            if _end(part) != _cells(part):
                raise UnalignedBlocks(f"what rank {rank} holds of {list(layout.shape)} is not in memory of its own")
            bases[part] = (count, count := count + -(-_cells(part) // blocks.size))
        ranges.append(Range(rank, *bases[part]))
    return flat((count,), ranges), Blocking(layout.shape, blocks, tuple(bases))


def _end(part: tuple[Spread, ...]) -> int:
    """One more than the last place in memory that a part has."""
    return max(
        each.offset + sum((size - 1) * stride for size, stride in zip(each.box.shape, each.strides, strict=True)) + 1
        for each in part
    )


def blocking_of(layout: Layout, blocks: Blocks) -> tuple[Layout, Blocking]:
    """The layout of the scales of a tensor that is cut as `layout`, and where its blocks are.

    Raises:
        UnalignedBlocks: a cut falls inside of a block, and nobody says what codes mean.
    """
    try:
        return blocked(layout, blocks.size), Blocking(layout.shape, blocks)
    except UnalignedBlocks:
        if not blocks.codes:
            raise
    return parted(layout, blocks)


def note_of(blocking: Blocking) -> dict[str, Any]:
    """What is stored of it; not a book, of which each unit would have a copy: who restores says it again."""
    size, codes, book = blocking.blocks.size, blocking.blocks.codes, blocking.blocks.book
    kept = Blocks(size, codes, book if isinstance(book, str) else "")
    return msgspec.to_builtins(msgspec.structs.replace(blocking, blocks=kept))


def from_note(options: Mapping[str, Any], key: str) -> Blocking | None:
    """Where stored blocks are; None: it was not said."""
    note = options.get(BLOCKS_NOTE, {}).get(key)
    return None if note is None else msgspec.convert(note, Blocking)


def cells_of(layout: Layout, rank: int) -> Indices:
    """Which cell of the row-major order is at each place of a rank's memory, which has no others."""
    pieces = layout.held.get(rank, ())
    found = np.zeros(sum(piece.box.cells for piece in pieces), np.int64)
    strides = strides_of(layout.shape)
    for piece in pieces:
        found[_grid(piece.box.shape, piece.strides, piece.offset)] = _grid(
            piece.box.shape, strides, _first(piece, strides)
        )
    return found


def _first(piece: Piece, strides: tuple[int, ...]) -> int:
    return sum(at * stride for at, stride in zip(piece.box.start, strides, strict=True))


def _grid(shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Indices:
    """The places of a box's cells, in row-major order."""
    found = np.array([offset], np.int64)
    for size, stride in zip(shape, strides, strict=True):
        found = (found[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return found


def flat_ranges(layout: Layout, rank: int) -> list[tuple[int, int]]:
    """The cells that a rank holds as ranges of the row-major order, joined where they touch.

    Raises:
        UnalignedBlocks: they are so many small ranges that blocks make no sense.
    """
    strides = strides_of(layout.shape)
    ranges: list[tuple[int, int]] = []
    for piece in layout.by_rank.get(rank, ()):
        if not piece.box.cells:
            continue
        first = _first(piece, strides)
        if flat_boxes(layout.shape, first, first + piece.box.cells) != [piece.box]:
            raise UnalignedBlocks(f"{piece.box} of {list(layout.shape)} is not contiguous, so blocks cross its border")
        if ranges and ranges[-1][1] == first:
            ranges[-1] = (ranges[-1][0], first + piece.box.cells)
        else:
            ranges.append((first, first + piece.box.cells))
    return ranges
