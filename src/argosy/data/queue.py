"""A queue of items that other processes make during the training, such as rollouts; the same again until `commit`.

The files of a queue are in `spool.py`.

Q1  An item goes to one rank in one committed step; retries of the step get the same items.
Q2  The state is one cursor, the number of committed items. From an older cursor, the same items come in the same order.
Q3  An item is deleted only when a durable checkpoint includes it.
"""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from argosy.core import ConfigError, DeadlinePassed
from argosy.data.errors import SourceChanged
from argosy.data.rank_and_size import rank_and_size
from argosy.data.share import check_share, share
from argosy.data.spool import Spool, TooFew, is_full
from argosy.data.waits import Waits
from argosy.fabric import dump, load

FORMAT = 1
_POLL_S = 0.002
_POLL_MAX_S = 0.05


@dataclass(slots=True)
class TakenItems:
    """Describes the items that were handed out last."""

    position: int
    """How many items came before them."""
    count: int
    names: list[str]
    """Their files, in the order of their keys or of the time of `put`."""


class Queue:
    """A directory to which any process of this user adds items, and from which the ranks of one run take them.

    A step takes `batch` items; each rank gets its share as lists of at most `micro` (default: one list). A queue can be
    pickled: pass it to the actors that put items. When `capacity` items wait (default: four batches), `put` blocks.
    Waiting for room or for items ends after `patience_s`.
    """

    def __init__(
        self,
        directory: str | Path,
        batch: int,
        micro: int | None = None,
        *,
        capacity: int | None = None,
        patience_s: float = 600.0,
    ) -> None:
        check_share(batch, micro, 1)
        self.batch, self.micro, self.patience_s = batch, micro, patience_s
        self.capacity = 4 * batch if capacity is None else capacity
        if self.capacity < batch:
            raise ConfigError(
                f"a queue of {self.capacity} items cannot hold a batch of {batch}", hint="use a larger capacity"
            )
        if patience_s <= 0:
            raise ConfigError(f"patience_s must be positive: {patience_s}")
        self.directory = Path(directory).absolute()
        self.cursor = 0
        """Items committed since the start of the training."""
        self.step = 0
        """Batches committed."""
        self.waits = Waits()
        self.handed: TakenItems | None = None
        self.exhausted = False
        """Always False: other processes may put more items."""
        self._spool = Spool(self.directory)
        self._spool.open()
        self._place: tuple[int, int] | None = None
        self._settled = False
        self._put = 0

    def __reduce__(self) -> Any:
        return _rebuild, (self.directory, self.batch, self.micro, self.capacity, self.patience_s)

    # -- for processes that make items -------------------------------------------------------------

    def put(self, item: Any, *, key: int | tuple[int, ...] | None = None) -> bool:
        """Add an item, waiting while the queue is full; when this returns, the item survives any kill.

        With a `key` it is added once: False if the key exists already, waiting or not yet deleted. Items are taken in
        the order of their keys, or else of time.

        Raises:
            ConfigError: the item cannot be pickled, or `key` does not consist of integers from 0 on.
            DeadlinePassed: there was no room within `patience_s`.
        """
        name = self._name(key)
        pickled, _ = dump(item, in_band=True)
        waiting = _Waiting(self.patience_s)
        while key is None or not self._spool.knows(name):
            try:
                if (there := self._spool.waiting()) < self.capacity:
                    self._spool.add(name, pickled)
                    return True
                why = f"{there} items wait, of at most {self.capacity}: check that a trainer takes them"
            except OSError as error:
                why = self._why_full(error)
            waiting.pause(f"waiting for room in the queue {self.directory.name}", why)
        return False

    def _name(self, key: Any) -> str:
        if key is None:
            self._put += 1
            return f"{time.time_ns():020d}.{os.getpid()}.{self._put}"
        parts: tuple[Any, ...] = cast(Any, key) if isinstance(key, tuple) else (key,)
        if not parts or not all(isinstance(part, int) and 0 <= part < 10**12 for part in parts):
            raise ConfigError(f"a key must be an integer from 0 on, or a tuple of such: {key!r}")
        return "-".join(f"{part:012d}" for part in parts)

    def __len__(self) -> int:
        """How many items wait to be taken for the first time."""
        return self._spool.waiting()

    # -- for ranks that take items -----------------------------------------------------------------

    def place(self, rank: int, size: int) -> None:
        """Take items as `rank` of `size`: where not all ranks are data-parallel."""
        check_share(self.batch, self.micro, size, rank)
        self._place = rank, size

    @property
    def size(self) -> int:
        """The number of ranks that share a batch."""
        return self._rank_and_size()[1]

    @property
    def samples(self) -> int:
        """How many items a step takes, over all ranks."""
        return self.batch

    @property
    def pieces(self) -> int:
        """How many lists of items this rank has in a step."""
        return len(self._shares())

    def batches(self, check: Callable[[], None] | None = None) -> Iterator[list[Any]]:
        """Wait for this rank's items of the step at the cursor and hand them out, the same again until `commit`.

        `check` is called meanwhile; it raises to end the wait.

        Raises:
            DeadlinePassed: there were too few items within `patience_s`.
        """
        cursor = self.cursor
        names = self._wait_for_names(check)
        for start, stop in self._shares():
            if self.cursor != cursor:
                raise ConfigError("the step was committed before all of its items were handed out")
            self.handed = TakenItems(cursor + start, stop - start, names[start:stop])
            yield [load(self._spool.read(name)) for name in names[start:stop]]

    def rehearse(self) -> Iterator[list[Any]]:
        """As `batches`, with any items of the queue, which are not taken. Yields nothing if the queue is empty."""
        for start, stop in self._shares():
            found = self._spool.some(stop - start)
            self.handed = TakenItems(self.cursor + start, stop - start, [])
            if found:
                yield [load(found[number % len(found)]) for number in range(stop - start)]

    def commit(self) -> None:
        """The step is done: move the cursor past its items."""
        self.cursor += self.batch
        self.step += 1

    def skip(self, steps: int) -> None:
        """Skip the next batches, on all ranks."""
        self.cursor += steps * self.batch
        self.step += steps

    def forget(self, cursor: int) -> None:
        """Delete the items before `cursor`: no resume needs them any more. Called by one rank."""
        self._spool.forget(cursor)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, which is the same on every rank."""
        return {"queue": FORMAT, "cursor": self.cursor, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken, with any number of ranks and any batch size.

        Raises:
            SourceChanged: this is not a state of a queue.
        """
        if not isinstance(cast(Any, state), dict) or state.get("queue") != FORMAT:
            raise SourceChanged(f"not a queue's state of version {FORMAT}: {str(state)[:200]}")
        self.cursor, self.step = state["cursor"], state["step"]

    def _rank_and_size(self) -> tuple[int, int]:
        if self._place is None:
            self.place(*rank_and_size())  # Not earlier: a process that only puts items need not be a rank.
            assert self._place is not None
        return self._place

    def _shares(self) -> list[tuple[int, int]]:
        return share(self.batch, self.micro, *self._rank_and_size())

    def _why_full(self, error: OSError) -> str:
        """Say that the disk is full, or raise any other error."""
        if not is_full(error):
            raise error
        return f"{self.directory}: {error.strerror}"

    def _wait_for_names(self, check: Callable[[], None] | None) -> list[str]:
        waiting = _Waiting(self.patience_s)
        with self.waits.measure(self.step):
            if not self._settled:
                self._spool.settle()
                self._settled = True
            while True:
                try:
                    found = self._spool.find(self.cursor, self.batch)
                    if not isinstance(found, TooFew):
                        return found
                    why = f"{found.there} are there: check that a process puts items"
                except OSError as error:
                    why = self._why_full(error)
                waiting.pause(f"waiting for {self.batch} items in the queue {self.directory.name}", why, check)


class _Waiting:
    """A wait with a deadline, whose pauses grow."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s, self._pause_s = patience_s, _POLL_S
        self._until = time.monotonic() + patience_s

    def pause(self, what: str, why: str, check: Callable[[], None] | None = None) -> None:
        """Sleep a little.

        Raises:
            DeadlinePassed: the deadline has passed.
        """
        if check is not None:
            check()
        if time.monotonic() > self._until:
            raise DeadlinePassed(what, self._patience_s, hint=why)
        time.sleep(self._pause_s)
        self._pause_s = min(_POLL_MAX_S, self._pause_s * 1.2)


def _rebuild(directory: Path, batch: int, micro: int | None, capacity: int, patience_s: float) -> Queue:
    return Queue(directory, batch, micro, capacity=capacity, patience_s=patience_s)
