"""Plans name the samples at each position of the training, as rows of integers; readers make the named samples.

A plan belongs to the loader and does no I/O. A reader runs where samples are made; it has no state that matters: any
process may read any row, any number of times.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from argosy.core import ConfigError
from argosy.data.collate import Empty
from argosy.data.errors import SourceChanged
from argosy.data.order import Order, OrderSegment, Shuffle
from argosy.data.permute import Permutation, derive_key

Rows = NDArray[np.int64]
"""One or more rows per sample; the columns are an agreement between a plan and its reader."""
State = dict[str, Any]
CHUNK, CHUNK_MIN = 4096, 64
_LIBRARIES = {"jax", "numpy", "pandas", "polars", "pyarrow", "torch", "xarray"}


@dataclass(frozen=True, slots=True, order=True)
class Identity:
    """Identifies a sample: number of the source in a mix, epoch, index."""

    source: int
    epoch: int
    index: int


class SampleReader(Protocol):
    """Makes the samples that rows name."""

    def count(self, rows: Rows) -> int:
        """The number of samples that the rows name."""
        return len(rows)

    def one(self, rows: Rows, number: int) -> Any: ...
    def keys(self, rows: Rows) -> list[tuple[int, int]]:
        """Return epoch and index of each sample, from which its random numbers are derived."""
        ...

    def identity(self, rows: Rows, number: int) -> Identity: ...
    def where(self, rows: Rows, number: int) -> str: ...
    def gather(self, rows: Rows, empty: Empty) -> Any | None:
        """Make the whole batch at once; None if the source cannot."""
        return None

    def prepare(self, hint: Any) -> None:
        """Take the plan's hint for the rows that follow."""

    def report(self, rows: Rows) -> Any:
        """Return what the plan should note once the microbatch of these rows is committed."""
        return None


class SourcePlan(Protocol):
    """The endless order in which a source is loaded. Positions count samples from the start of the training."""

    sticky: bool = False
    """Whether the same worker should read the same first column again."""

    def rows(self, start: int, count: int) -> Rows: ...
    def end(self, epochs: int) -> int:
        """The position at which so many epochs are over."""
        ...

    def reader(self) -> SampleReader: ...
    def hint(self, rows: Rows) -> Any:
        """Return what saves the reader of these rows work, or None."""
        return None

    def note(self, report: Any) -> None:
        """A microbatch is committed, and this is its reader's report."""

    def state(self, position: int) -> State: ...
    def restore(self, state: State, position: int, *, resize: bool) -> None: ...


class Chunks:
    """Rows made in chunks, because numpy's calls cost more than its arithmetic; two chunks are kept."""

    def __init__(self, make: Callable[[int, int], Rows], size: int) -> None:
        self._make, self._size = make, size
        self._kept: dict[int, Rows] = {}

    def rows(self, start: int, count: int) -> Rows:
        size = self._size
        first, last = start // size, (start + count - 1) // size
        chunks = [self._chunk(number) for number in range(first, last + 1)]
        whole = chunks[0] if len(chunks) == 1 else np.concatenate(chunks)
        return whole[start - first * size : start - first * size + count]

    def _chunk(self, number: int) -> Rows:
        if number not in self._kept:
            rows = self._make(number * self._size, self._size)
            self._kept = {number: rows, **dict(list(self._kept.items())[:1])}
        return self._kept[number]

    def clear(self) -> None:
        self._kept.clear()


class MapPlan(SourcePlan):
    """The plan of one source with a length."""

    def __init__(self, source: Any, shuffle: Shuffle, seed: int) -> None:
        self.source = source
        self.order = Order(length_of(source), shuffle, seed)
        # Each epoch costs calls of its own, so a tiny source gets small chunks.
        self._chunks = Chunks(self._make_rows, min(CHUNK, max(CHUNK_MIN, self.order.length)))

    def rows(self, start: int, count: int) -> Rows:
        return self._chunks.rows(start, count)

    def _make_rows(self, start: int, count: int) -> Rows:
        epochs, indices = self.order.at(np.arange(start, start + count))
        return np.stack([np.zeros_like(epochs), epochs, indices], axis=1)

    def end(self, epochs: int) -> int:
        return self.order.end_of(epochs)

    def reader(self) -> SampleReader:
        return MapReader([self.source])

    def state(self, position: int) -> State:
        return order_state(self.order)

    def restore(self, state: State, position: int, *, resize: bool) -> None:
        restore_order(self.order, state, position, resize=resize)
        self._chunks.clear()


class MixPlan(SourcePlan):
    """The plan of several sources by weight: each has its quota of every 1,000 positions, at random places.

    X1  Every block of 1,000 positions holds the quotas exactly.
    X2  Each source has its own epochs, with each sample once per epoch.
    """

    BLOCK = 1000

    def __init__(self, mix: "Mix", seed: int) -> None:
        self.sources, self.seed = mix.sources, seed
        self.orders = [
            Order(length_of(source), mix.shuffle_of(number), derive_key(seed, "mix", number))
            for number, source in enumerate(mix.sources)
        ]
        self.quotas = quotas(mix.weights, self.BLOCK)
        self._pattern = lru_cache(maxsize=16)(self._draw_pattern)
        shortest = min(order.length for order in self.orders)
        self._chunks = Chunks(self._make_rows, min(CHUNK, max(CHUNK_MIN, shortest)))

    def rows(self, start: int, count: int) -> Rows:
        return self._chunks.rows(start, count)

    def _make_rows(self, start: int, count: int) -> Rows:
        result = np.empty((count, 3), np.int64)
        positions = np.arange(start, start + count)
        blocks, offsets = np.divmod(positions, self.BLOCK)
        for block in np.unique(blocks):
            chosen = blocks == block
            sources, turns = self._pattern(int(block))
            result[chosen, 0] = sources[offsets[chosen]]
            result[chosen, 1] = turns[offsets[chosen]]  # Replaced below: the source's own position.
        for number, order in enumerate(self.orders):
            chosen = result[:, 0] == number
            if chosen.any():
                result[chosen, 1], result[chosen, 2] = order.at(result[chosen, 1])
        return result

    def _draw_pattern(self, block: int) -> tuple[Rows, Rows]:
        """Return the source at each place of a block, and the position within that source."""
        places = Permutation(self.BLOCK, derive_key(self.seed, "quota", block)).at(np.arange(self.BLOCK))
        sources = np.searchsorted(np.cumsum(self.quotas), places, side="right").astype(np.int64)
        turns = np.empty(self.BLOCK, np.int64)
        for number, quota in enumerate(self.quotas):
            turns[sources == number] = block * quota + np.arange(quota)
        return sources, turns

    def end(self, epochs: int) -> int:
        raise ConfigError("a mix has no epochs, only its sources have", hint="limit the training by steps")

    def reader(self) -> SampleReader:
        return MapReader(self.sources)

    def state(self, position: int) -> State:
        return {"mix": self.quotas, "orders": [order_state(order) for order in self.orders]}

    def restore(self, state: State, position: int, *, resize: bool) -> None:
        if state.get("mix") != self.quotas:
            raise SourceChanged(f"the mix differs from the state to resume from: {state.get('mix')}, now {self.quotas}")
        for number, (order, saved) in enumerate(zip(self.orders, state["orders"], strict=True)):
            turns = position // self.BLOCK * self.quotas[number]
            sources, _ = self._pattern(position // self.BLOCK)
            turns += int((sources[: position % self.BLOCK] == number).sum())
            restore_order(order, saved, turns, resize=resize)
        self._chunks.clear()


class Mix:
    """Several sources with weights, for a Loader: `Mix([code, text], [3, 1])`."""

    def __init__(
        self, sources: Sequence[Any], weights: Sequence[float], shuffle: Shuffle | Sequence[Shuffle] | None = None
    ) -> None:
        if len(sources) != len(weights) or not sources:
            raise ConfigError(f"a mix needs a weight for each source: {len(sources)} sources, {len(weights)} weights")
        self.sources, self.weights = list(sources), list(weights)
        self.shuffle = shuffle if shuffle is not None else Shuffle.full()
        quotas(self.weights, MixPlan.BLOCK)

    def shuffle_of(self, number: int) -> Shuffle:
        return self.shuffle if isinstance(self.shuffle, Shuffle) else self.shuffle[number]


def quotas(weights: Sequence[float], total: int) -> list[int]:
    """Divide `total` by weight, by largest remainders.

    Raises:
        ConfigError: a weight is negative or not finite, or so small that it would never be drawn.
    """
    if any(not np.isfinite(weight) or weight <= 0 for weight in weights):
        raise ConfigError(f"weights must be positive numbers: {list(weights)}")
    exact = [weight * total / sum(weights) for weight in weights]
    result = [int(each) for each in exact]
    by_rest = sorted(range(len(exact)), key=lambda i: (result[i] - exact[i], i))
    for number in by_rest[: total - sum(result)]:
        result[number] += 1
    if 0 in result:
        small = weights[result.index(0)]
        raise ConfigError(f"a weight is too small to be drawn once in {total} samples: {small}")
    return result


class MapReader(SampleReader):
    """Reads rows of (source, epoch, index)."""

    def __init__(self, sources: Sequence[Any]) -> None:
        self.sources = list(sources)

    def one(self, rows: Rows, number: int) -> Any:
        source, _, index = rows[number].tolist()
        return self.sources[source][index]

    def keys(self, rows: Rows) -> list[tuple[int, int]]:
        return [(epoch, index) for _, epoch, index in rows.tolist()]

    def identity(self, rows: Rows, number: int) -> Identity:
        return Identity(*(int(word) for word in rows[number]))

    def where(self, rows: Rows, number: int) -> str:
        source, epoch, index = (int(word) for word in rows[number])
        return f"sample {index} of epoch {epoch} ({where_in(self.sources[source], index)})"

    def gather(self, rows: Rows, empty: Empty) -> Any | None:
        source = self.sources[rows[0, 0]]
        if (rows[:, 0] != rows[0, 0]).any() or not offers(source, "gather"):
            return None
        return source.gather(rows[:, 2], empty)


def offers(source: Any, what: str) -> bool:
    """Whether a source has Argosy's `gather` or `where`: tensors and tables have other methods of these names."""
    return hasattr(source, what) and type(source).__module__.partition(".")[0] not in _LIBRARIES


def length_of(source: Any) -> int:
    """Return the number of samples.

    Raises:
        ConfigError: this is not a source; the message says what is.
    """
    if isinstance(source, str | bytes | os.PathLike):
        raise ConfigError(
            f"a source is not the name of a file: {str(cast(Any, source))[:200]}",
            hint="Tokens(path, length), Jsonl(path) or Parquet(path) reads one",
        )
    if isinstance(source, Mapping):
        raise ConfigError(
            f"a source is indexed from 0, not by keys: {type(cast(Any, source)).__name__}",
            hint="use one of its values, a list of them, or Mix(sources, weights)",
        )
    if not hasattr(source, "__getitem__") or not hasattr(source, "__len__"):
        raise ConfigError(
            f"a source has __len__ and __getitem__: {type(source).__name__}",
            hint="for iterables use argosy.data.Shards",
        )
    return len(source)


def where_in(source: Any, index: int) -> str:
    """Say where a sample comes from; the source may describe it."""
    if offers(source, "where"):
        with suppress(Exception):  # This text is for an error message: do not raise another error.
            return str(source.where(index))
    return f"{type(source).__name__}[{index}]"


def order_state(order: Order) -> State:
    """Return what the order of a source depends on, small enough for every checkpoint."""
    segments = [list(segment) for segment in order.segments]
    return {"segments": segments, "seed": order.seed, "shuffle": [order.shuffle.block, order.shuffle.window]}


def restore_order(order: Order, state: State, position: int, *, resize: bool) -> None:
    """Continue in the order of `state`.

    Raises:
        SourceChanged: the seed, the shuffle or, unless `resize`, the length differs.
    """
    if state["seed"] != order.seed:
        raise SourceChanged(f"the seed differs from the state to resume from: {state['seed']}, now {order.seed}")
    if tuple(state["shuffle"]) != (order.shuffle.block, order.shuffle.window):
        saved = Shuffle(*cast("list[int]", state["shuffle"]))
        raise SourceChanged(f"the shuffle differs from the state to resume from: {saved}, now {order.shuffle}")
    length = order.length
    segments = [OrderSegment(*segment) for segment in state["segments"]]
    if segments[-1].length == length:
        order.segments = segments
        return
    if not resize:
        raise SourceChanged(
            f"the source had {segments[-1].length} samples when the state was saved, now {length}",
            hint="pass resized=True: the current epoch keeps its length, the next one has the new length",
        )
    order.segments = segments
    order.change_length(length, position)
    if len(order.segments) > 1 and order.segments[0].length > length:
        # The current epoch contains samples that no longer exist: begin an epoch of the new length here.
        epoch = order.epoch_of(position) + 1
        order.segments = [OrderSegment(position, epoch, length)]
