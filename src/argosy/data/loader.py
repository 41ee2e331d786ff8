"""The loader: hands out a rank's microbatches of the step at the cursor, the same again until `commit`.

It makes no batch itself: batch makers do (`batch_makers.py`, `processes.py`).

D1  The cursor is the whole state: the next batch depends on it, the source and the seed, not on ranks or workers.
D2  Only `commit` moves the cursor forward.
D3  Every sample comes exactly once per epoch; a batch may span two epochs.
"""

import itertools
import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from argosy.core import ConfigError
from argosy.data.batch_makers import BatchMaker, InlineMaker, MicrobatchSpan, ThreadMaker, Threads
from argosy.data.choose_plan import choose_plan
from argosy.data.collate import Collate, to_tensors
from argosy.data.errors import SourceChanged, TooManySkipped
from argosy.data.microbatch import Microbatch, MicrobatchRecipe, Skip, Skipped
from argosy.data.order import Shuffle
from argosy.data.plan import Identity, Rows, SampleReader, SourcePlan
from argosy.data.processes import Processes, ProcessMaker
from argosy.data.rank_and_size import rank_and_size
from argosy.data.share import check_share, share
from argosy.data.waits import Waits
from argosy.transfer import pinned

FORMAT = 1
SKIPPED_KEPT = 1000
"""Records of skipped samples that a loader keeps; the count includes all."""


@dataclass(slots=True)
class HandedOut:
    """Describes the microbatch that was handed out last."""

    position: int
    """The position of its first sample, counted from the start of the training."""
    count: int
    reader: SampleReader
    rows: Rows
    skipped: Sequence[Skipped] = ()

    @property
    def identities(self) -> list[Identity]:
        """Source, epoch and index of its samples, except skipped ones."""
        skipped = {each.identity for each in self.skipped}
        every = (self.reader.identity(self.rows, number) for number in range(self.reader.count(self.rows)))
        return [identity for identity in every if identity not in skipped]

    @property
    def ids(self) -> list[int]:
        """The indices of its samples."""
        return [identity.index for identity in self.identities]


@dataclass(slots=True)
class _Held:
    """What `close` needs, without a reference to the loader, so that a garbage-collected loader is closed, too."""

    maker: BatchMaker | None = None
    skipped: list[Skipped] = field(default_factory=list[Skipped])

    def close(self) -> None:
        maker, self.maker = self.maker, None
        if maker is not None:
            maker.close()


class Loader:
    """Loads global batches of `batch` samples; each rank gets its microbatches of `micro` (default: one per rank).

    The plain way: `for batch in loader`, endless unless `epochs` is given; a `state_dict()` taken after the last
    microbatch of a step includes that step. The transactional way: `batches()`, then `commit()`; without the commit
    the next `batches()` hands out the same microbatches.
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
        self._plan: SourcePlan = choose_plan(source, shuffle or Shuffle.full(), seed)
        self._epochs = epochs
        self._recipe = MicrobatchRecipe(self._plan.reader(), seed, skip, collate)
        self._workers = Processes(workers) if isinstance(workers, int) and workers else workers
        self.rank, self.size = rank_and_size()
        check_share(batch, micro, self.size)
        self._end = None if epochs is None else self._plan.end(epochs)
        self.cursor = 0
        """Samples committed since the start of the training."""
        self.step = 0
        """Global batches committed."""
        self.skipped_count = 0
        self.waits = Waits()
        self.handed: HandedOut | None = None
        self._reports: dict[MicrobatchSpan, Microbatch] = {}
        self._held = _Held()
        weakref.finalize(self, self._held.close)

    @property
    def skipped(self) -> list[Skipped]:
        """The samples that this rank skipped, the newest last."""
        return list(self._held.skipped)

    def place(self, rank: int, size: int) -> None:
        """Load as `rank` of `size` from now on: after a resize, or where not all ranks are data-parallel."""
        check_share(self.batch, self.micro, size, rank)
        self.rank, self.size = rank, size

    def batches(self) -> Iterator[Any]:
        """Hand out this rank's microbatches of the step at the cursor, the same again until `commit`."""
        cursor = self.cursor
        self._reports.clear()
        for span in self._spans(cursor):
            if self.cursor != cursor:
                raise ConfigError("the step was committed before all of its microbatches were handed out")
            yield self._hand_out(span)

    @property
    def pieces(self) -> int:
        """How many microbatches this rank has in the step at the cursor."""
        return len(self._spans(self.cursor))

    @property
    def samples(self) -> int:
        """How many samples the global batch at the cursor has."""
        return self._count(self.cursor)

    def commit(self) -> None:
        """The step is done: move the cursor to the next one."""
        for made in self._reports.values():
            self._plan.note(made.extra)
            self.skipped_count += len(made.skipped)
            self._held.skipped += made.skipped
        del self._held.skipped[:-SKIPPED_KEPT]
        self._reports.clear()
        self.cursor += self._count(self.cursor)
        self.step += 1

    def skip(self, steps: int) -> None:
        """Skip the next global batches, on all ranks."""
        for _ in range(steps):
            self._reports.clear()
            self.commit()

    def rewind(self) -> None:
        """Begin again at the first sample, as an evaluation does each time."""
        self._reports.clear()
        self.cursor = self.step = 0

    def close(self) -> None:
        """Stop the workers; they start again if the loader is used again."""
        self._held.close()

    @property
    def exhausted(self) -> bool:
        """Whether all epochs are over."""
        return self._end is not None and self.cursor >= self._end

    def __iter__(self) -> Iterator[Any]:
        while not self.exhausted:
            self._reports.clear()
            spans = self._spans(self.cursor)
            if not spans:
                self.commit()
            for span in spans:
                held = [self._hand_out(span)]
                if span is spans[-1]:
                    self.commit()  # Before the user gets it: a state saved after this step includes it.
                yield held.pop()  # Keep no reference: its memory is reused as soon as the user drops it.

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
        """Continue where `state` was taken, with any number of ranks and workers, and any batch size.

        Raises:
            SourceChanged: the order would differ; the loader is unchanged.
        """
        if not isinstance(cast(Any, state), dict) or state.get("format") != FORMAT:
            raise SourceChanged(f"not a loader's state of version {FORMAT}: {str(state)[:200]}")
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
        return self.batch if self._end is None else max(0, min(self.batch, self._end - cursor))

    def _spans(self, cursor: int) -> list[MicrobatchSpan]:
        shares = share(self._count(cursor), self.micro, self.rank, self.size)
        return [MicrobatchSpan(cursor + start, stop - start) for start, stop in shares]

    def _following(self, span: MicrobatchSpan) -> Iterator[MicrobatchSpan]:
        cursor = self.cursor
        while self._count(cursor):
            yield from (each for each in self._spans(cursor) if each.start > span.start)
            cursor += self._count(cursor)

    def _hand_out(self, span: MicrobatchSpan) -> Any:
        with self.waits.measure(self.step):
            if self._held.maker is None:
                self._held.maker = self._start_maker()
            maker = self._held.maker
            made = maker.get(span, list(itertools.islice(self._following(span), maker.depth)))
        self._account(span, made)
        self.handed = HandedOut(span.start, span.samples, self._recipe.reader, made.rows, made.skipped)
        return as_tensors(made.batch, sys.modules.get("torch"))

    def _account(self, span: MicrobatchSpan, made: Microbatch) -> None:
        """Keep the microbatch's report until the step is committed, and check the limit of skipped samples."""
        self._reports[span] = replace(made, batch=None)
        skip = self._recipe.skip
        if skip is None:
            return
        count = self.skipped_count + sum(len(each.skipped) for each in self._reports.values())
        if count > skip.limit or made.batch is None:
            last = next(each for made in reversed(self._reports.values()) for each in made.skipped)
            what = (
                f"more than {skip.limit} samples failed"
                if count > skip.limit
                else "every sample of a microbatch failed"
            )
            hint = "" if count > skip.limit else "a microbatch needs one good sample: use a larger `micro`"
            raise TooManySkipped(f"{what}, the last one: {last.where}: {last.error}", hint=hint)

    def _start_maker(self) -> BatchMaker:
        match self._workers:
            case Processes():
                return ProcessMaker(self._plan, self._recipe, self._workers)
            case Threads():
                return ThreadMaker(self._plan, self._recipe, self._workers)
            case _:
                return InlineMaker(self._plan, self._recipe)


def _check(batch: Any, micro: Any, seed: Any, epochs: Any, shuffle: Any, workers: Any) -> None:
    """Refuse wrong arguments, some of which torch's DataLoader accepts."""
    for name, value in (("batch", batch), ("micro", 1 if micro is None else micro), ("seed", seed)):
        if not isinstance(value, int):
            raise ConfigError(f"{name} must be an integer: {value!r}")
    if epochs is not None and (not isinstance(epochs, int) or epochs < 1):
        raise ConfigError(f"epochs must be at least 1, or None for no end: {epochs!r}")
    if shuffle is not None and not isinstance(shuffle, Shuffle):
        raise ConfigError(f"shuffle must be Shuffle.full(), .blocks(size, window) or .none(): {shuffle!r}")
    if not isinstance(workers, int | Processes | Threads) or isinstance(workers, bool):
        raise ConfigError(f"workers must be a number, Processes(...) or Threads(...): {workers!r}")


def as_tensors(batch: Any, torch: Any) -> Any:
    """Convert arrays to tensors if torch is imported, in pinned memory if this process uses an accelerator."""
    if torch is None:
        return batch
    return to_tensors(batch, lambda array: pinned(torch.from_numpy(array)))
