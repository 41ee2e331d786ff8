"""A queue: items that others make while the training runs, such as rollouts; the same again until they are committed.

Q1  An item comes to one rank in one step that counts; attempts that do not count get the same items.
Q2  The state is one cursor, the items that count. Back at an older cursor, the same items come in the same order.
Q3  An item is deleted only when a durable checkpoint counts it.
"""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from argosy.core import ConfigError, DeadlinePassed
from argosy.data.errors import SourceChanged
from argosy.data.place import my_place
from argosy.data.share import check_share, share
from argosy.data.spool import Spool, TooFew, is_full
from argosy.data.waits import Waits
from argosy.fabric import dump, load

FORMAT = 1
_POLL_S = 0.002
_POLL_MAX_S = 0.05


@dataclass(slots=True)
class Taken:
    """What the items that were handed out last are."""

    position: int
    """How many items came before them."""
    count: int
    names: list[str]
    """As files, in the order of their keys or of the time at which they were put."""


class Queue:
    """A directory to which any process of this user adds items, and from which the ranks of one run take them.

    A step takes `batch` items, each rank its share as lists of at most `micro` (default: one list). A queue can be
    sent to other processes: pass it to the actors that put. At most `capacity` items wait (default: four batches), then
    `put` does; waiting for room or for items ends after `patience_s`.
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
                f"a queue of {self.capacity} items never has a batch of {batch}", hint="use a larger capacity"
            )
        if patience_s <= 0:
            raise ConfigError(f"patience_s must be positive: {patience_s}")
        self.directory = Path(directory).absolute()
        self.cursor = 0
        """Items committed since the start of the training."""
        self.step = 0
        """Batches committed."""
        self.waits = Waits()
        self.handed: Taken | None = None
        self.exhausted = False
        """Others may always put more."""
        self._spool = Spool(self.directory)
        self._spool.open()
        self._place: tuple[int, int] | None = None
        self._settled = False
        self._put = 0

    def __reduce__(self) -> Any:
        return _again, (self.directory, self.batch, self.micro, self.capacity, self.patience_s)

    # -- who makes items ---------------------------------------------------------------------------

    def put(self, item: Any, *, key: int | tuple[int, ...] | None = None) -> bool:
        """Add an item, waiting while the queue is full; when this returns it survives whatever is killed.

        With a `key` it is added once: False if it was there already, waiting or not yet deleted. Items are taken in
        the order of their keys, without in the order of time.

        Raises:
            ConfigError: it cannot be pickled, or `key` is not made of whole numbers from 0 on.
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
                why = f"{there} items wait, of at most {self.capacity}; does a trainer take them?"
            except OSError as error:
                if not is_full(error):
                    raise
                why = f"{self.directory}: {error.strerror}"
            waiting.go_on(f"room in the queue {self.directory.name}", why)
        return False

    def _name(self, key: Any) -> str:
        if key is None:
            self._put += 1
            return f"{time.time_ns():020d}.{os.getpid()}.{self._put}"
        parts: tuple[Any, ...] = cast(Any, key) if isinstance(key, tuple) else (key,)
        if not parts or not all(isinstance(part, int) and 0 <= part < 10**12 for part in parts):
            raise ConfigError(f"a key is a whole number from 0 on, or a tuple of such: {key!r}")
        return "-".join(f"{part:012d}" for part in parts)

    def __len__(self) -> int:
        """How many items wait to be taken for the first time."""
        return self._spool.waiting()

    # -- who takes them ----------------------------------------------------------------------------

    def place(self, rank: int, size: int) -> None:
        """Take as `rank` of `size`: where data-parallel ranks are not all ranks."""
        if not 0 <= rank < size:
            raise ConfigError(f"ranks are numbered from 0: rank {rank} of {size}")
        check_share(self.batch, self.micro, size)
        self._place = rank, size

    @property
    def size(self) -> int:
        """The number of ranks that share a batch."""
        return self._my_place()[1]

    @property
    def samples(self) -> int:
        """How many items a step takes, over all ranks."""
        return self.batch

    @property
    def pieces(self) -> int:
        """How many lists of items this rank has in a step."""
        return len(self._shares())

    def batches(self, check: Callable[[], None] | None = None) -> Iterator[list[Any]]:
        """Hand out this rank's items of the step at the cursor, the same again until `commit`; waits for them.

        `check` is called while it waits, to raise if there is no use in that any more.

        Raises:
            DeadlinePassed: there were too few items within `patience_s`.
        """
        cursor = self.cursor
        names = self._wait_for_names(check)
        for start, stop in self._shares():
            if self.cursor != cursor:
                raise ConfigError("the step was committed while its items were still being handed out")
            self.handed = Taken(cursor + start, stop - start, names[start:stop])
            yield [load(self._spool.read(name)) for name in names[start:stop]]

    def rehearse(self) -> Iterator[list[Any]]:
        """As `batches`, with whatever items are there; they are not taken. Nothing, if there are none."""
        for start, stop in self._shares():
            found = self._spool.some(stop - start)
            self.handed = Taken(self.cursor + start, stop - start, [])
            if found:
                yield [load(found[number % len(found)]) for number in range(stop - start)]

    def commit(self) -> None:
        """The step is done: its items count."""
        self.cursor += self.batch
        self.step += 1

    def skip(self, steps: int) -> None:
        """Leave out the next batches, on all ranks."""
        self.cursor += steps * self.batch
        self.step += steps

    def forget(self, cursor: int) -> None:
        """No resume comes back to a state before `cursor` any more: delete the items that it counts. By one rank."""
        self._spool.forget(cursor)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, which is the same on every rank."""
        return {"queue": FORMAT, "cursor": self.cursor, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, with any number of ranks and any batch.

        Raises:
            SourceChanged: this is no state of a queue.
        """
        if not isinstance(cast(Any, state), dict) or state.get("queue") != FORMAT:
            raise SourceChanged(f"this is no state of a queue, or of another version: {str(state)[:200]}")
        self.cursor, self.step = state["cursor"], state["step"]

    def _my_place(self) -> tuple[int, int]:
        if self._place is None:
            self.place(*my_place())  # Not earlier: whoever only puts has another place.
            assert self._place is not None
        return self._place

    def _shares(self) -> list[tuple[int, int]]:
        return share(self.batch, self.micro, *self._my_place())

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
                    why = f"{found.there} are there; does somebody put?"
                except OSError as error:
                    if not is_full(error):
                        raise
                    why = f"{self.directory}: {error.strerror}"
                waiting.go_on(f"{self.batch} items in the queue {self.directory.name}", why, check)


class _Waiting:
    """A wait with a deadline that looks less and less often."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s, self._pause_s = patience_s, _POLL_S
        self._until = time.monotonic() + patience_s

    def go_on(self, what: str, why: str, check: Callable[[], None] | None = None) -> None:
        """Wait a little longer.

        Raises:
            DeadlinePassed: it was long enough.
        """
        if check is not None:
            check()
        if time.monotonic() > self._until:
            raise DeadlinePassed(what, self._patience_s, hint=why)
        time.sleep(self._pause_s)
        self._pause_s = min(_POLL_MAX_S, self._pause_s * 1.2)


def _again(directory: Path, batch: int, micro: int | None, capacity: int, patience_s: float) -> Queue:
    return Queue(directory, batch, micro, capacity=capacity, patience_s=patience_s)
