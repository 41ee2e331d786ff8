"""Batch makers: make microbatches in the loader's thread, or in other threads. `processes.py` has worker processes.

C1  A batch maker returns the same microbatch for a span any number of times, and has no state that matters.
C2  It works on, and keeps, no more than the spans ahead.
"""

import contextlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from argosy.core import ConfigError
from argosy.data.array_pool import ArrayPool, keep_heap
from argosy.data.errors import WorkerLost
from argosy.data.keyed_random import preserved_generators
from argosy.data.microbatch import Microbatch, MicrobatchRecipe, make_microbatch
from argosy.data.plan import SourcePlan, offers


class MicrobatchSpan(NamedTuple):
    """A microbatch: the position of its first sample, and how many samples it has."""

    start: int
    samples: int


class BatchMaker(Protocol):
    """Makes microbatches."""

    def get(self, span: MicrobatchSpan, ahead: Sequence[MicrobatchSpan]) -> Microbatch:
        """Return the microbatch; work on those `ahead` meanwhile, and drop all others."""
        ...

    @property
    def depth(self) -> int:
        """How many spans ahead it can use."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Threads:
    """Make batches in threads of the training process: for sources that release the GIL.

    Threads share the global random generators, so these are not seeded per sample: draw from `sample_rng()`.
    """

    count: int
    ahead: int = 2
    """Microbatches made ahead, per thread."""
    hang_s: float = 300.0

    def __post_init__(self) -> None:
        if self.count < 1 or self.ahead < 1:
            raise ConfigError(f"count and ahead must be at least 1: {self.count}, {self.ahead}")


class InlineMaker:
    """Makes each microbatch in the loader's thread when it is asked for."""

    depth = 0

    def __init__(self, plan: SourcePlan, recipe: MicrobatchRecipe) -> None:
        self._plan, self._recipe = plan, recipe
        sources: list[Any] = getattr(recipe.reader, "sources", [None])
        self._pool = ArrayPool()
        keep_heap()
        self._calls_user_code = not all(offers(source, "gather") for source in sources)

    def get(self, span: MicrobatchSpan, ahead: Sequence[MicrobatchSpan]) -> Microbatch:
        rows = self._plan.rows(*span)
        # Seeding the samples must not change the random numbers of the model.
        with preserved_generators() if self._calls_user_code else contextlib.nullcontext():
            return make_microbatch(self._recipe, rows, self._pool.empty, hint=self._plan.hint(rows))

    def close(self) -> None:
        return


class ThreadMaker:
    """Makes microbatches in a pool of threads, some spans ahead."""

    def __init__(self, plan: SourcePlan, recipe: MicrobatchRecipe, threads: Threads) -> None:
        if plan.sticky:
            raise ConfigError("iterables cannot be read by threads", hint="use worker processes, or no workers")
        self._plan, self._recipe, self._hang_s = plan, replace(recipe, seeded=False), threads.hang_s
        self.depth = threads.count * threads.ahead
        self._pool = ArrayPool()
        keep_heap()
        self._threads = ThreadPoolExecutor(threads.count, thread_name_prefix="argosy-data")
        self._asked: dict[MicrobatchSpan, Future[Microbatch]] = {}

    def get(self, span: MicrobatchSpan, ahead: Sequence[MicrobatchSpan]) -> Microbatch:
        wanted = [span, *ahead]
        for other in [each for each in self._asked if each not in wanted]:
            self._asked.pop(other).cancel()
        for each in wanted:
            if each not in self._asked:
                rows = self._plan.rows(*each)
                self._asked[each] = self._threads.submit(make_microbatch, self._recipe, rows, self._pool.empty)
        try:
            return self._asked[span].result(timeout=self._hang_s)
        except FutureTimeout:
            raise WorkerLost(
                f"a thread has worked for {self._hang_s:g} s on the samples at position {span.start}",
                hint="a thread cannot be killed: use worker processes, or a longer hang_s",
            ) from None
        finally:
            self._asked.pop(span, None)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
