"""Move boxes between buffers and sum their digests in the same pass: builds the tables that native code performs.

D1  The sum of a tensor does not depend on how it was cut: sums of disjoint boxes add up to it.
D2  A sum alone says nothing of zeros or of the shape; `finish` binds name, dtype and shape to it.
The digest finds accidents, not attackers: it is not cryptographic.
"""

import ctypes
import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from argosy._select import native
from argosy.transfer.boxes import Box, strides_of
from argosy.transfer.layout import Piece

Sums = tuple[int, int]
ZERO: Sums = (0, 0)
_LOOPS = 3
_FIELDS = 16


class Spot(NamedTuple):
    """Where a box lies: the address of its first cell, and strides in cells."""

    address: int
    strides: tuple[int, ...]


class Copy(NamedTuple):
    """One box of a tensor of `shape`, from a spot to a spot (None: only sum it)."""

    box: Box
    shape: tuple[int, ...]
    itemsize: int
    source: Spot
    destination: Spot | None = None


def spot(address: int, itemsize: int, strides: Sequence[int], inside: Sequence[int]) -> Spot:
    """The spot of the cell at index `inside` of an array."""
    return Spot(address + itemsize * sum(i * s for i, s in zip(inside, strides, strict=True)), tuple(strides))


def spot_in(piece: Piece, address: int, itemsize: int, start: Sequence[int]) -> Spot:
    """Where the cell at index `start` of the tensor lies in a piece, whose rank's memory begins at `address`."""
    inside = [a - b for a, b in zip(start, piece.box.start, strict=True)]
    return spot(address + piece.offset * itemsize, itemsize, piece.strides, inside)


class Progress:
    """How far `Table.perform` is, for another thread to look at; with one thread copies are made in their order."""

    def __init__(self) -> None:
        self._records = ctypes.c_uint64()
        self._ends: list[int] = []

    def begin(self, counts: Iterable[int]) -> int:
        """So many records has each copy; returns where native code counts those that are complete."""
        self._ends = list(accumulate(counts))
        return ctypes.addressof(self._records)

    @property
    def copies(self) -> int:
        """How many, from the first on, are complete."""
        return bisect_right(self._ends, self._records.value)


class Table(NamedTuple):
    """Copies as native code makes them: so many rows for each."""

    rows: NDArray[np.int64]
    counts: NDArray[np.int64]

    def moved(self, sources: NDArray[np.int64], destination: int) -> "Table":
        """The same between memory that begins elsewhere: for each row its source, for all one destination."""
        rows = self.rows.copy()
        rows[:, 0] += sources
        rows[:, 1] += destination
        return Table(rows, self.counts)

    def only(self, chosen: NDArray[np.bool_]) -> "Table":
        """Some of the copies, in their order."""
        return Table(self.rows[np.repeat(chosen, self.counts)], self.counts[chosen])

    def perform(self, threads: int = 1, progress: Progress | None = None) -> NDArray[np.uint64]:
        """Make the copies; returns the sums of each. The GIL is released while bytes move.

        The caller keeps the memory alive and lets no two copies write the same cells.
        """
        begun = progress.begin(self.counts.tolist()) if progress else 0
        found = np.frombuffer(native.copy_digest(self.rows.tobytes(), threads, begun), "<u8").reshape(-1, 2)
        # Sums are taken modulo 2^64, so those of some rows are the difference of two running ones.
        running = np.zeros((len(found) + 1, 2), np.uint64)
        np.cumsum(found, axis=0, out=running[1:])
        ends = np.cumsum(self.counts)
        return running[ends] - running[ends - self.counts]


def table_of(copies: Iterable[Copy]) -> Table:
    """The table of these copies."""
    parts = [rows_of(copy) for copy in copies]
    rows = np.array([row for part in parts for row in part], "<i8").reshape(-1, _FIELDS)
    return Table(rows, np.array([len(part) for part in parts], "<i8"))


def copy_boxes(copies: Iterable[Copy], threads: int = 1) -> list[Sums]:
    """Make the copies, see `Table.perform`; returns the sums of each."""
    return [(low, high) for low, high in table_of(copies).perform(threads).tolist()]


def rows_of(copy: Copy) -> list[tuple[int, ...]]:
    """The strided copy as rows of native code's table: three loops around a contiguous run."""
    if not copy.box.cells:
        return []
    size = copy.itemsize
    if copy.box.shape == copy.shape and _is_plain(copy):
        to = copy.destination.address if copy.destination else 0
        return [(copy.source.address, to, 0, copy.box.cells * size, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0)]
    logical = strides_of(copy.shape)
    start = sum(a * s for a, s in zip(copy.box.start, logical, strict=True)) * size
    from_, to = copy.source, copy.destination or Spot(0, copy.source.strides)
    run = size
    loops: list[tuple[int, tuple[int, ...]]] = []
    for n, *strides in reversed(list(zip(copy.box.shape, from_.strides, to.strides, logical, strict=True))):
        steps = tuple(stride * size for stride in strides)
        if n == 1:
            continue
        if not loops and all(step == run for step in steps):
            run *= n
        elif loops and all(step == s * loops[-1][0] for step, s in zip(steps, loops[-1][1], strict=True)):
            loops[-1] = (loops[-1][0] * n, loops[-1][1])
        else:
            loops.append((n, steps))
    inner, outer = loops[:_LOOPS], loops[_LOOPS:]
    inner += [(1, (0, 0, 0))] * (_LOOPS - len(inner))
    inner.reverse()  # The smallest strides innermost.
    tail = (run, *(n for n, _ in inner), *(steps[side] for side in range(3) for _, steps in inner))
    records: list[tuple[int, ...]] = []
    for index in product(*(range(n) for n, _ in outer)):
        moved = [sum(i * steps[side] for i, (_, steps) in zip(index, outer, strict=True)) for side in range(3)]
        target = to.address + moved[1] if copy.destination else 0
        records.append((from_.address + moved[0], target, start + moved[2], *tail))
    return records


def _is_plain(copy: Copy) -> bool:
    """A whole tensor, contiguous on both sides."""
    plain = strides_of(copy.shape)
    return copy.source.strides == plain and (copy.destination is None or copy.destination.strides == plain)


def add(sums: Iterable[Sums]) -> Sums:
    """The sums of disjoint boxes together."""
    low = high = 0
    for a, b in sums:
        low, high = low + a, high + b
    return low % 2**64, high % 2**64


def finish(name: str, dtype: str, shape: Sequence[int], sums: Sums) -> str:
    """The digest of a tensor: 32 hex digits over its name, dtype, shape and sums."""
    text = f"{name}\0{dtype}\0{','.join(map(str, shape))}\0{sums[0]:016x}{sums[1]:016x}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
