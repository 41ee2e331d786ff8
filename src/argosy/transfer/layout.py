"""How a global tensor is cut into boxes over ranks, and where each box lies in its rank's memory. Pure.

L1  A layout is a value: every rank computes the same one, and its hash names it.
L2  A piece says where its cells lie in the rank's local buffer: an offset and strides, in cells.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property
from itertools import product
from typing import Literal

import msgspec

from argosy.core import ConfigError
from argosy.transfer.boxes import Box, flat_boxes, strides_of, whole


class Piece(msgspec.Struct, frozen=True, order=True):
    """One box of a tensor in the memory of one rank."""

    rank: int
    box: Box
    offset: int
    strides: tuple[int, ...]


class Split(msgspec.Struct, frozen=True):
    """A mesh dimension that cuts dimension `dim`; `factor` > 1 as the strided shard of FSDP over TP does."""

    dim: int
    factor: int = 1


Placement = Split | Literal["replicate"]


class Layout(msgspec.Struct, frozen=True, dict=True):
    """A tensor of `shape`, and who holds which box of it."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @cached_property
    def by_rank(self) -> dict[int, tuple[Piece, ...]]:
        """The pieces of each rank that holds any."""
        found: dict[int, list[Piece]] = {}
        for piece in self.pieces:
            found.setdefault(piece.rank, []).append(piece)
        return {rank: tuple(pieces) for rank, pieces in found.items()}

    @cached_property
    def held(self) -> dict[int, tuple[Piece, ...]]:
        """The same, those that have cells."""
        return {rank: tuple(piece for piece in pieces if piece.box.cells) for rank, pieces in self.by_rank.items()}

    @cached_property
    def replicas(self) -> dict[Box, tuple[Piece, ...]]:
        """The distinct boxes, each with the pieces that hold it, ranks ascending."""
        found: dict[Box, list[Piece]] = {}
        for piece in sorted(self.pieces):
            if piece.box.cells:
                found.setdefault(piece.box, []).append(piece)
        return {box: tuple(pieces) for box, pieces in sorted(found.items())}

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self.by_rank))

    @cached_property
    def key(self) -> int:
        return hash((self.shape, self.pieces))

    def __hash__(self) -> int:
        return self.key


@cache
def replicated(shape: tuple[int, ...], ranks: tuple[int, ...] = (0,)) -> Layout:
    """Every rank holds all of it."""
    strides = strides_of(shape)
    return Layout(shape, tuple(Piece(rank, whole(shape), 0, strides) for rank in ranks))


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """First and length of part `index`: as torch.chunk cuts, the last ones shorter or empty."""
    each = -(-size // parts)
    first = min(each * index, size)
    return first, min(each, size - first)


@cache
def sharded(
    shape: tuple[int, ...], mesh: tuple[int, ...], placements: tuple[Placement, ...], ranks: tuple[int, ...] = ()
) -> Layout:
    """The layout of a DTensor: `mesh` is its shape, `ranks` its ranks in row-major order (0, 1, … if not given)."""
    pieces: list[Piece] = []
    for position, coordinate in enumerate(product(*map(range, mesh))):
        rank = ranks[position] if ranks else position
        spans = _spans(shape, mesh, placements, coordinate)
        local = tuple(sum(length for _, length in dim) for dim in spans)
        strides = strides_of(local)
        for choice in product(*(range(len(dim)) for dim in spans)):
            start = tuple(spans[d][c][0] for d, c in enumerate(choice))
            size = tuple(spans[d][c][1] for d, c in enumerate(choice))
            place = [sum(length for _, length in spans[d][:c]) for d, c in enumerate(choice)]
            offset = sum(p * s for p, s in zip(place, strides, strict=True))
            pieces.append(Piece(rank, Box(start, size), offset, strides))
    return Layout(shape, tuple(pieces))


def _spans(
    shape: tuple[int, ...], mesh: tuple[int, ...], placements: Sequence[Placement], coordinate: tuple[int, ...]
) -> list[list[tuple[int, int]]]:
    """Per dimension, the intervals (first, length) that the rank at `coordinate` holds, in local order."""
    indices = [[(0, size)] for size in shape]
    for size, placement, at in zip(mesh, placements, coordinate, strict=True):
        if placement == "replicate":
            continue
        spans = indices[placement.dim]
        if placement.factor == 1:
            total = sum(length for _, length in spans)
            indices[placement.dim] = _slice(spans, *chunk(total, size, at))
        else:
            indices[placement.dim] = _strided(spans, placement.factor, size, at)
    return indices


def _slice(spans: list[tuple[int, int]], first: int, length: int) -> list[tuple[int, int]]:
    """`length` cells from position `first` of what the spans list; never empty, so that a piece stays."""
    found: list[tuple[int, int]] = []
    position = 0
    for start, size in spans:
        low, high = max(first, position), min(first + length, position + size)
        if low < high:
            found.append((start + low - position, high - low))
        position += size
    return found or [(spans[0][0] if spans else 0, 0)]


def _strided(spans: list[tuple[int, int]], factor: int, size: int, at: int) -> list[tuple[int, int]]:
    """Cut into `factor` parts first, then each of them into `size`; keep part `at` of each."""
    total = sum(length for _, length in spans)
    found: list[tuple[int, int]] = []
    for part in range(factor):
        first, length = chunk(total, factor, part)
        inner, inner_length = chunk(length, size, at)
        if inner_length:
            found += _slice(spans, first + inner, inner_length)
    return found or [(spans[0][0] if spans else 0, 0)]


class Range(msgspec.Struct, frozen=True):
    """Cells `first <= i < last` of the row-major tensor, at `offset` of the rank's flat buffer."""

    rank: int
    first: int
    last: int
    offset: int = 0


def flat(shape: tuple[int, ...], ranges: Iterable[Range]) -> Layout:
    """The layout of a tensor cut along its row-major order, as ZeRO's flat buffers are."""
    pieces: list[Piece] = []
    for span in ranges:
        offset = span.offset
        for box in flat_boxes(shape, span.first, span.last):
            pieces.append(Piece(span.rank, box, offset, strides_of(box.shape)))
            offset += box.cells
    return Layout(shape, tuple(pieces))


def blocked(layout: Layout, size: int) -> Layout:
    """The layout of one value per `size` cells, in row-major order, of a tensor that is cut as `layout`.

    Raises:
        ConfigError: a cut does not fall on the border of a block.
    """
    cells, strides = whole(layout.shape).cells, strides_of(layout.shape)
    ranges: list[Range] = []
    for piece in (piece for pieces in layout.held.values() for piece in pieces):
        first = sum(at * stride for at, stride in zip(piece.box.start, strides, strict=True))
        last = first + piece.box.cells
        is_flat = flat_boxes(layout.shape, first, last) == [piece.box]
        if not is_flat or first % size or (last % size and last != cells):
            raise ConfigError(
                f"blocks of {size} cells are cut by {piece.box} of {list(layout.shape)} on rank {piece.rank}",
                hint="choose ranks or sizes of layers so that each rank has whole blocks",
            )
        ranges.append(Range(piece.rank, first // size, -(-last // size), piece.offset // size))
    return flat((-(-cells // size),), ranges)


def flat_buffer(shapes: Mapping[str, tuple[int, ...]], ranks: int, *, align: int = 1) -> dict[str, Layout]:
    """Layouts of tensors that lie one after the other in one buffer, cut into `ranks` equal parts.

    The buffer is padded to a multiple of `ranks * align` cells; a tensor may cross the border between two ranks.
    """
    sizes = {name: whole(shape).cells for name, shape in shapes.items()}
    unit = ranks * align
    each = -(-sum(sizes.values()) // unit) * unit // ranks
    layouts: dict[str, Layout] = {}
    position = 0
    for name, shape in shapes.items():
        ranges: list[Range] = []
        for rank in range(position // each if each else 0, ranks):
            low, high = max(position, rank * each), min(position + sizes[name], (rank + 1) * each)
            if low < high:
                ranges.append(Range(rank, low - position, high - position, low - rank * each))
        layouts[name] = flat(shape, ranges)
        position += sizes[name]
    return layouts
