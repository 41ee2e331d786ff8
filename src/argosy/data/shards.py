"""Iterables as a source: a fixed number of logical shards, read in turns, for any number of ranks.

Position p is item p // S of shard p % S, and each shard begins its next epoch when it ends: so the order is defined
although no length is known. A reader keeps the iterators of its shards open as a cache; a shard can be opened again
anywhere, from the state of a committed step or by skipping items.

I1  The order depends on the shards alone, not on ranks, workers, rollbacks or resumes.
"""

import pickle
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from argosy.core import ConfigError
from argosy.data.errors import SourceChanged, Unreadable
from argosy.data.plan import Identity, Rows, SampleReader, SourcePlan, State

STATE_BYTES_MAX = 1 << 20
RECENT = 8
"""Samples of a shard that a reader keeps for retried steps."""

_OVER = object()

Mark = tuple[int, int, int, Any]
"""The position in a shard: the next turn, its epoch, the items read in it, and the iterable's own state or None."""


class Shards:
    """A source of iterables: `open_shard(shard, shards, epoch)` returns an iterable over that part of the data.

    An iterable with `state_dict` and `load_state_dict` resumes from its state, others by skipping items. If the
    global batch is a multiple of the number of shards, each rank reads its own shards only.
    """

    def __init__(self, open_shard: Callable[[int, int, int], Iterable[Any]], shards: int = 64) -> None:
        if shards < 1:
            raise ConfigError(f"shards must be at least 1: {shards}")
        self.open_shard, self.shards = open_shard, shards


class ShardPlan(SourcePlan):
    """Makes rows of (shard, turn)."""

    sticky = True

    def __init__(self, source: Shards) -> None:
        self.source = source
        self.marks: dict[int, Mark] = {}
        """The positions of the shards after the last commit, as far as this rank has read them."""

    def rows(self, start: int, count: int) -> Rows:
        turns, shards = np.divmod(np.arange(start, start + count), self.source.shards)
        return np.stack([shards, turns], axis=1)

    def end(self, epochs: int) -> int:
        raise ConfigError("shards have no common epoch: their lengths are unknown", hint="limit the training by steps")

    def reader(self) -> SampleReader:
        return ShardReader(self.source)

    def hint(self, rows: Rows) -> dict[int, Mark]:
        """Return the known positions of the shards of these rows, to open them without reading from the start."""
        return {shard: self.marks[shard] for shard in set(rows[:, 0].tolist()) if shard in self.marks}

    def note(self, report: Any) -> None:
        self.marks.update(report or {})

    def state(self, position: int) -> State:
        state = {"shards": self.source.shards, "marks": {str(shard): list(mark) for shard, mark in self.marks.items()}}
        if len(pickle.dumps(state)) > STATE_BYTES_MAX:
            raise ConfigError(f"the states of the shards exceed {STATE_BYTES_MAX} bytes in all")
        return state

    def restore(self, state: State, position: int, *, resize: bool) -> None:
        if state.get("shards") != self.source.shards:
            raise SourceChanged(
                f"the number of shards differs from the state to resume from: {state.get('shards')}, "
                f"now {self.source.shards}"
            )
        self.marks = {int(shard): (mark[0], mark[1], mark[2], mark[3]) for shard, mark in state["marks"].items()}


class _Open:
    def __init__(self, source: Shards, shard: int, mark: Mark | None) -> None:
        self._source, self._shard = source, shard
        self.turn, self.epoch, self.item, state = mark or (0, 0, 0, None)
        self.recent: deque[tuple[int, Any]] = deque(maxlen=RECENT)
        self._enter(state)
        if state is not None:
            return
        for number in range(self.item):
            if next(self._iterator, _OVER) is _OVER:
                raise Unreadable(self._name, f"it had at least {self.item} items before, now {number}")

    @property
    def _name(self) -> str:
        return f"shard {self._shard} of {self._source.shards}, epoch {self.epoch}"

    def _enter(self, state: Any = None) -> None:
        """Open the epoch; the iterable keeps the state, or else its iterator."""
        iterable: Any = self._source.open_shard(self._shard, self._source.shards, self.epoch)
        self._keeper = iterable if hasattr(iterable, "load_state_dict") else None
        if self._keeper is not None and state is not None:
            self._keeper.load_state_dict(state)
        self._iterator: Any = iter(iterable)
        if self._keeper is None and hasattr(self._iterator, "load_state_dict"):
            self._keeper = self._iterator
            if state is not None:
                self._keeper.load_state_dict(state)

    def advance(self) -> Any:
        """Return the next item, if necessary of the next epoch."""
        for _ in range(2):
            try:
                sample = next(self._iterator)
            except StopIteration:
                if self.item == 0:
                    break
                self.epoch, self.item = self.epoch + 1, 0
                self._enter()
                continue
            self.recent.append((self.turn, sample))
            self.turn, self.item = self.turn + 1, self.item + 1
            return sample
        raise Unreadable(self._name, "it is empty")

    def mark(self) -> Mark:
        state = None if self._keeper is None else self._keeper.state_dict()
        return self.turn, self.epoch, self.item, state


class ShardReader(SampleReader):
    """Reads rows of (shard, turn); its open shards are a cache."""

    def __init__(self, source: Shards) -> None:
        self._source = source
        self._open: dict[int, _Open] = {}
        self._hint: dict[int, Mark] = {}

    def prepare(self, hint: dict[int, Mark]) -> None:
        self._hint = hint

    def one(self, rows: Rows, number: int) -> Any:
        shard, turn = (int(word) for word in rows[number])
        current = self._open.get(shard)
        if current is not None and turn < current.turn:
            for kept, sample in current.recent:
                if kept == turn:
                    return sample
            current = None
        mark = self._hint.get(shard)
        usable = mark if mark is not None and mark[0] <= turn else None
        if current is None or (usable is not None and usable[0] > current.turn):
            current = _Open(self._source, shard, usable)
            self._open[shard] = current
        try:
            while current.turn < turn:
                current.advance()
            return current.advance()
        except BaseException:
            self._open.pop(shard, None)  # A generator that raised is exhausted.
            raise

    def keys(self, rows: Rows) -> list[tuple[int, int]]:
        return [(0, turn * self._source.shards + shard) for shard, turn in rows.tolist()]

    def identity(self, rows: Rows, number: int) -> Identity:
        shard, turn = (int(word) for word in rows[number])
        return Identity(shard, 0, turn * self._source.shards + shard)

    def where(self, rows: Rows, number: int) -> str:
        shard, turn = (int(word) for word in rows[number])
        return f"item {turn} of shard {shard} of {self._source.shards}"

    def report(self, rows: Rows) -> dict[int, Mark]:
        """Return the positions of the shards after these rows, except of those that are further already."""
        last = {int(shard): int(turn) for shard, turn in rows}
        return {
            shard: current.mark()
            for shard, turn in last.items()
            if (current := self._open.get(shard)) is not None and current.turn == turn + 1
        }

    def __getstate__(self) -> dict[str, Any]:
        return {"_source": self._source, "_open": {}, "_hint": {}}


def merge_states(states: Sequence[State]) -> State:
    """Merge the states of all ranks, each of which knows the shards that it read, so that a resume skips least."""
    if not states or len({state["cursor"] for state in states}) != 1:
        raise ConfigError("merge_states needs states of the same step, one of each rank")
    marks: dict[str, Any] = {}
    for state in states:
        for shard, mark in state.get("marks", {}).items():
            if shard not in marks or mark[0] > marks[shard][0]:
                marks[shard] = mark
    return {**states[0], "marks": marks}
