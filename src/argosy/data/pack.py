"""Pack sequences of different lengths into rows of one length: a pure function of the lengths of a window.

A window is a number of neighbours in the shuffled order. Each window is packed alone, without carry from the one
before, so that a row can be found from its window.

G1  Every token of every sample comes exactly once per epoch, in one piece unless the sample is longer than a row.
"""

import bisect
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from argosy.core import ConfigError
from argosy.data.collate import Array
from argosy.data.errors import SourceChanged
from argosy.data.order import Order, Shuffle
from argosy.data.permute import Indices
from argosy.data.plan import (
    Identity,
    Rows,
    SampleReader,
    SourcePlan,
    State,
    length_of,
    order_state,
    restore_order,
    where_in,
)


class PackedPiece(NamedTuple):
    """Tokens `start` to `stop` of sample number `sample` of its window."""

    sample: int
    start: int
    stop: int


def pack_window(lengths: Sequence[int], row: int) -> list[list[PackedPiece]]:
    """Pack the samples of a window into rows of `row` tokens: largest first, each into the fullest row with room.

    A sample longer than a row is cut. Rows are sorted by the sample of their first piece.
    """
    pieces = [
        PackedPiece(sample, start, min(start + row, length))
        for sample, length in enumerate(lengths)
        for start in range(0, length, row)
    ]
    pieces.sort(key=lambda piece: (piece.start - piece.stop, piece.sample, piece.start))
    rows: list[list[PackedPiece]] = []
    rooms: list[tuple[int, int]] = []
    """Free tokens and number of each row that has any, ascending."""
    for piece in pieces:
        size = piece.stop - piece.start
        place = bisect.bisect_left(rooms, (size, -1))
        if place == len(rooms):
            rows.append([piece])
            room, number = row - size, len(rows) - 1
        else:
            room, number = rooms.pop(place)
            rows[number].append(piece)
            room -= size
        if room:
            bisect.insort(rooms, (room, number))
    return sorted(rows, key=lambda each: (each[0].sample, each[0].start))


class Pack:
    """Sequences packed into rows of `length` tokens, for a Loader, whose batch then counts rows.

    A row is a dict of arrays: `tokens`, `positions` (from 0 in each sequence) and `documents` (1, 2, ... in a row, 0
    for padding: see `document_mask`). `lengths` are the lengths of the source's samples; without them
    `source.lengths` is used, or all samples are read once.
    """

    def __init__(self, source: Any, length: int, *, window: int = 256, lengths: Sequence[int] | None = None) -> None:
        if length < 1 or window < 1:
            raise ConfigError(f"length and window must be at least 1: length {length}, window {window}")
        self.source, self.length, self.window = source, length, window
        count = length_of(source)
        known: Any = lengths if lengths is not None else getattr(source, "lengths", None)
        if known is None:
            known = [len(source[index]) for index in range(count)]
        self.lengths = np.asarray(known, np.int64)
        if len(self.lengths) != count:
            raise ConfigError(f"there are {len(self.lengths)} lengths for {count} samples")
        if count and not self.lengths.any():
            raise ConfigError("all sequences are empty: there is nothing to load")


class PackPlan(SourcePlan):
    """Makes rows of (row of the batch, epoch, index, start, stop), one per piece."""

    def __init__(self, pack: Pack, shuffle: Shuffle, seed: int) -> None:
        self.pack = pack
        self.order = Order(length_of(pack.source), shuffle, seed)
        self._windows = -(-self.order.length // pack.window)
        """Windows per epoch; the last one may be short, because a window never spans two epochs."""
        self._anchor = (0, 0)
        """A position and the window that begins there."""
        self._packed: Callable[[int], tuple[Indices, list[list[PackedPiece]]]] = lru_cache(maxsize=64)(self._pack)

    def _pack(self, window: int) -> tuple[Indices, list[list[PackedPiece]]]:
        epoch, number = divmod(window, self._windows)
        start = epoch * self.order.length + number * self.pack.window
        stop = min(start + self.pack.window, (epoch + 1) * self.order.length)
        _, indices = self.order.at(np.arange(start, stop))
        return indices, pack_window(self.pack.lengths[indices].tolist(), self.pack.length)

    def rows(self, start: int, count: int) -> Rows:
        result: list[tuple[int, ...]] = []
        for place in range(count):
            window, number = self._find(start + place)
            indices, rows = self._packed(window)
            epoch = window // self._windows
            result += [(place, epoch, int(indices[piece.sample]), piece.start, piece.stop) for piece in rows[number]]
        return np.array(result, np.int64)

    def _find(self, position: int) -> tuple[int, int]:
        """Return the window of a position and the number of its row there, searching from the last known window."""
        at, window = self._anchor if position >= self._anchor[0] else (0, 0)
        while position >= at + (held := len(self._packed(window)[1])):
            at, window = at + held, window + 1
        if position - at < 1:
            self._anchor = (at, window)
        return window, position - at

    def end(self, epochs: int) -> int:
        return sum(len(self._pack(window)[1]) for window in range(epochs * self._windows))

    def reader(self) -> SampleReader:
        return PackReader(self.pack.source, self.pack.length)

    def state(self, position: int) -> State:
        window, row = self._find(position)
        packing = [self.pack.length, self.pack.window]
        return {**order_state(self.order), "pack": packing, "anchor": [position - row, window]}

    def restore(self, state: State, position: int, *, resize: bool) -> None:
        if state.get("pack") != [self.pack.length, self.pack.window]:
            raise SourceChanged(
                f"the packing differs from the state to resume from: {state.get('pack')}, "
                f"now {[self.pack.length, self.pack.window]}"
            )
        restore_order(self.order, state, position, resize=False)
        self._anchor = (state["anchor"][0], state["anchor"][1])


class PackReader(SampleReader):
    """Makes packed rows."""

    def __init__(self, source: Any, length: int) -> None:
        self.source, self.length = source, length

    def count(self, rows: Rows) -> int:
        return int(rows[-1, 0]) + 1

    def one(self, rows: Rows, number: int) -> dict[str, Array]:
        pieces = rows[rows[:, 0] == number]
        tokens, positions, documents = (np.zeros(self.length, np.int64) for _ in range(3))
        filled = 0
        for document, (_, _, index, start, stop) in enumerate(pieces.tolist(), 1):
            span = slice(filled, filled + stop - start)
            tokens[span] = np.asarray(self.source[index])[start:stop]
            positions[span] = np.arange(start, stop)
            documents[span] = document
            filled = span.stop
        return {"tokens": tokens, "positions": positions, "documents": documents}

    def keys(self, rows: Rows) -> list[tuple[int, int]]:
        firsts = np.searchsorted(rows[:, 0], np.arange(self.count(rows)))
        return [(epoch, index) for _, epoch, index, _, _ in rows[firsts].tolist()]

    def identity(self, rows: Rows, number: int) -> Identity:
        first = rows[rows[:, 0] == number][0]
        return Identity(0, int(first[1]), int(first[2]))

    def where(self, rows: Rows, number: int) -> str:
        indices = rows[rows[:, 0] == number][:, 2].tolist()
        names = ", ".join(where_in(self.source, index) for index in indices[:4])
        return f"a row packed from {len(indices)} samples ({names}{', ...' if len(indices) > 4 else ''})"


def document_mask(documents: Any) -> Any:
    """Return the attention mask, True where a token sees another: earlier ones of its own document.

    Its shape is (..., length, length).
    """
    same = (documents[..., :, None] == documents[..., None, :]) & (documents[..., None, :] > 0)
    length = documents.shape[-1]
    causal = np.tril(np.ones((length, length), bool))
    return same & (same.new_tensor(causal) if hasattr(same, "new_tensor") else causal)
