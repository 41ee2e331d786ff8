"""The loader: hands out a rank's microbatches by cursor, the same ones again until they are committed.

D1  The cursor is all there is: what comes next depends on it, the source and the seed, not on ranks or workers.
D2  The cursor moves at `commit` alone.
D3  Every sample comes exactly once per epoch; batches straddle epochs.
"""

import itertools
import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from argosy.core import ConfigError
from argosy.data.collate import Collate, to_tensors
from argosy.data.crew import Crew, Inline, ThreadCrew, Threads, Ticket
from argosy.data.errors import SourceChanged, TooManySkipped
from argosy.data.fill import Filled, Recipe, Skip, Skipped
from argosy.data.order import Shuffle
from argosy.data.place import my_place
from argosy.data.plan import Identity, Plan, Reader, Rows
from argosy.data.planning import plan_of
from argosy.data.processes import ProcessCrew, Processes
from argosy.data.share import check_share, share
from argosy.data.waits import Waits

FORMAT = 1
SKIPPED_KEPT = 1000
"""Records of skipped samples that a loader keeps; the count goes on."""


@dataclass(slots=True)
class Handed:
    """What the microbatch that was handed out last is."""

    position: int
    """Where in the order of everything its first sample is."""
    count: int
    reader: Reader
    rows: Rows
    skipped: Sequence[Skipped] = ()

    @property
    def identities(self) -> list[Identity]:
        """Source, epoch and index of its samples, without those that were skipped."""
        left_out = {each.identity for each in self.skipped}
        every = (self.reader.identity(self.rows, number) for number in range(self.reader.count(self.rows)))
        return [identity for identity in every if identity not in left_out]

    @property
    def ids(self) -> list[int]:
        """The indices of its samples."""
        return [identity.index for identity in self.identities]


@dataclass(slots=True)
class _Held:
    """What `close` needs, apart from the loader, so that a forgotten loader is closed too."""

    crew: Crew | None = None
    skipped: list[Skipped] = field(default_factory=list[Skipped])

    def close(self) -> None:
        crew, self.crew = self.crew, None
        if crew is not None:
            crew.close()


class Loader:
    """Loads global batches of `batch` samples, each rank its microbatches of `micro` (default: one per rank).

    The plain way: `for batch in loader`, endless unless `epochs` is given; `state_dict()` after the last
    microbatch of a step counts that step. The transactional way: `batches()`, then `commit()`; without the
    commit the next `batches()` hands out the same ones.
    """

    def __init__(
        self,
        source: Any,
        batch: int,
        micro: int | None = None,
        *,
        shuffle: Shuffle | None = None,
        seed: int = 0,
        epochs: int | None = None,
        workers: int | Processes | Threads = 0,
        collate: Collate | None = None,
        skip: Skip | None = None,
        resized: bool = False,
    ) -> None:
        _check(batch, micro, seed, epochs, shuffle, workers)
        self.batch, self.micro, self.seed, self._resized = batch, micro, seed, resized
        self._plan: Plan = plan_of(source, shuffle or Shuffle.full(), seed)
        self._epochs = epochs
        self._recipe = Recipe(self._plan.reader(), seed, skip, collate)
        self._workers = Processes(workers) if isinstance(workers, int) and workers else workers
        self.rank, self.size = my_place()
        check_share(batch, micro, self.size)
        self._end = None if epochs is None else self._plan.end(epochs)
        self.cursor = 0
        """Samples committed since the start of the training."""
        self.step = 0
        """Global batches committed."""
        self.skipped_count = 0
        self.waits = Waits()
        self.handed: Handed | None = None
        self._reports: dict[Ticket, Filled] = {}
        self._held = _Held()
        weakref.finalize(self, self._held.close)  # A loader that is forgotten is closed too.

    @property
    def skipped(self) -> list[Skipped]:
        """The samples that this rank left out, the newest at the end."""
        return list(self._held.skipped)

    def place(self, rank: int, size: int) -> None:
        """Work as `rank` of `size` from now on: after a resize, or where data-parallel ranks are not all ranks."""
        if not 0 <= rank < size:
            raise ConfigError(f"ranks are numbered from 0: rank {rank} of {size}")
        check_share(self.batch, self.micro, size)
        self.rank, self.size = rank, size

    def batches(self) -> Iterator[Any]:
        """Hand out this rank's microbatches of the step at the cursor; the same again until `commit`."""
        cursor = self.cursor
        self._reports.clear()
        for ticket in self._tickets(cursor):
            if self.cursor != cursor:
                raise ConfigError("the step was committed while its microbatches were still being handed out")
            yield self._hand_out(ticket)

    @property
    def pieces(self) -> int:
        """How many microbatches this rank has in the step at the cursor."""
        return len(self._tickets(self.cursor))

    @property
    def samples(self) -> int:
        """How many samples the global batch at the cursor has."""
        return self._count(self.cursor)

    def commit(self) -> None:
        """The step is done: go on to the next one."""
        for ticket, filled in self._reports.items():
            self._plan.note(ticket.start, filled.extra)
            self.skipped_count += len(filled.skipped)
            self._held.skipped += filled.skipped
        del self._held.skipped[:-SKIPPED_KEPT]
        self._reports.clear()
        self.cursor += self._count(self.cursor)
        self.step += 1

    def skip(self, steps: int) -> None:
        """Leave out the next global batches, on all ranks."""
        for _ in range(steps):
            self._reports.clear()
            self.commit()

    def rewind(self) -> None:
        """Begin again at the first sample: an evaluation goes through the same samples each time."""
        self._reports.clear()
        self.cursor = self.step = 0

    def close(self) -> None:
        """End the workers; they come again if the loader is used again."""
        self._held.close()

    @property
    def exhausted(self) -> bool:
        """Whether all epochs are over."""
        return self._end is not None and self.cursor >= self._end

    def __iter__(self) -> Iterator[Any]:
        while not self.exhausted:
            self._reports.clear()
            tickets = self._tickets(self.cursor)
            if not tickets:
                self.commit()
            for ticket in tickets:
                held = [self._hand_out(ticket)]
                if ticket is tickets[-1]:
                    self.commit()  # Before the user has it: a state saved after this step counts it.
                yield held.pop()  # Not kept here: its memory serves the next one as soon as the user drops it.

    def state_dict(self) -> dict[str, Any]:
        """Return the state, which is the same on every rank (for `Shards`, see there)."""
        return {
            "format": FORMAT,
            "cursor": self.cursor,
            "step": self.step,
            "skipped": self.skipped_count,
            **self._plan.state(self.cursor),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, with any number of ranks and workers, and any batch size.

        Raises:
            SourceChanged: the order would be another one; the loader is as before.
        """
        if not isinstance(cast(Any, state), dict) or state.get("format") != FORMAT:
            raise SourceChanged(f"this is no state of a loader, or of another version: {str(state)[:200]}")
        self._plan.restore(state, state["cursor"], resize=self._resized)
        self._reports.clear()
        self.cursor, self.step, self.skipped_count = state["cursor"], state["step"], state["skipped"]
        if self._epochs is not None:
            self._end = self._plan.end(self._epochs)

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _count(self, cursor: int) -> int:
        """How many samples the global batch at `cursor` has."""
        return self.batch if self._end is None else max(0, min(self.batch, self._end - cursor))

    def _tickets(self, cursor: int) -> list[Ticket]:
        shares = share(self._count(cursor), self.micro, self.rank, self.size)
        return [Ticket(cursor + start, stop - start) for start, stop in shares]

    def _following(self, ticket: Ticket) -> Iterator[Ticket]:
        """This rank's tickets after `ticket`."""
        cursor = self.cursor
        while self._count(cursor):
            yield from (each for each in self._tickets(cursor) if each.start > ticket.start)
            cursor += self._count(cursor)

    def _hand_out(self, ticket: Ticket) -> Any:
        with self.waits.measure(self.step):
            if self._held.crew is None:
                self._held.crew = self._hire()
            crew = self._held.crew
            filled = crew.get(ticket, list(itertools.islice(self._following(ticket), crew.depth)))
        self._account(ticket, filled)
        self.handed = Handed(ticket.start, ticket.samples, self._recipe.reader, filled.rows, filled.skipped)
        return as_tensors(filled.batch, sys.modules.get("torch"))

    def _account(self, ticket: Ticket, filled: Filled) -> None:
        """Keep what the microbatch reports until the step is committed."""
        self._reports[ticket] = replace(filled, batch=None)
        skip = self._recipe.skip
        if skip is None:
            return
        count = self.skipped_count + sum(len(each.skipped) for each in self._reports.values())
        if count > skip.limit or filled.batch is None:
            last = next(each for filled in reversed(self._reports.values()) for each in filled.skipped)
            what = (
                f"more than {skip.limit} samples failed"
                if count > skip.limit
                else "every sample of a microbatch failed"
            )
            hint = "" if count > skip.limit else "a microbatch needs one good sample: make `micro` larger"
            raise TooManySkipped(f"{what}, the last one: {last.where}: {last.error}", hint=hint)

    def _hire(self) -> Crew:
        match self._workers:
            case Processes():
                return ProcessCrew(self._plan, self._recipe, self._workers)
            case Threads():
                return ThreadCrew(self._plan, self._recipe, self._workers)
            case _:
                return Inline(self._plan, self._recipe)


def _check(batch: Any, micro: Any, seed: Any, epochs: Any, shuffle: Any, workers: Any) -> None:
    """Refuse what torch's loader would take, or nobody would, before it goes wrong further in."""
    for name, value in (("batch", batch), ("micro", 1 if micro is None else micro), ("seed", seed)):
        if not isinstance(value, int):
            raise ConfigError(f"{name} is a whole number: {value!r}")
    if epochs is not None and (not isinstance(epochs, int) or epochs < 1):
        raise ConfigError(f"epochs are at least 1, or None for no end: {epochs!r}")
    if shuffle is not None and not isinstance(shuffle, Shuffle):
        raise ConfigError(f"shuffle is Shuffle.full(), .blocks(size, window) or .none(): {shuffle!r}")
    if not isinstance(workers, int | Processes | Threads) or isinstance(workers, bool):
        raise ConfigError(f"workers are a number, Processes(...) or Threads(...): {workers!r}")


def as_tensors(batch: Any, torch: Any) -> Any:
    """Arrays become tensors where torch is imported, in pinned memory where there is an accelerator."""
    if torch is None or not hasattr(torch, "from_numpy"):
        return batch
    if torch.accelerator.is_available():
        return to_tensors(batch, lambda array: torch.from_numpy(array).pin_memory())
    return to_tensors(batch, torch.from_numpy)
