"""Who makes the microbatches: the loader itself, or threads beside it. Processes are in `processes`.

C1  A crew hands out what a ticket names, however often it is asked, and keeps nothing that matters.
C2  No more than the tickets ahead are worked on or kept.
"""

import contextlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from argosy.core import ConfigError
from argosy.data.errors import WorkerLost
from argosy.data.fill import Filled, Recipe, fill
from argosy.data.keyed import undisturbed
from argosy.data.plan import Plan, hint_of, offers
from argosy.data.pool import Pool, keep_heap


class Ticket(NamedTuple):
    """A microbatch by its place in the order of everything."""

    start: int
    samples: int


class Crew(Protocol):
    """Makes microbatches."""

    def get(self, ticket: Ticket, ahead: Sequence[Ticket]) -> Filled:
        """Return the microbatch; work on those `ahead` meanwhile, and forget all others."""
        ...

    @property
    def depth(self) -> int:
        """How many tickets ahead are of use."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Threads:
    """Make batches in threads of the training process: for sources that release the GIL.

    The global random generators are not keyed there: draw from `sample_rng()`.
    """

    count: int
    ahead: int = 2
    """Microbatches made ahead, per thread."""
    hang_s: float = 300.0

    def __post_init__(self) -> None:
        if self.count < 1 or self.ahead < 1:
            raise ConfigError(f"threads and microbatches ahead are at least 1: {self.count}, {self.ahead}")


class Inline:
    """The loader does it all when asked."""

    depth = 0

    def __init__(self, plan: Plan, recipe: Recipe) -> None:
        self._plan, self._recipe = plan, recipe
        sources: list[Any] = getattr(recipe.reader, "sources", [None])
        self._pool = Pool()
        keep_heap()
        self._calls_user_code = not all(offers(source, "gather") for source in sources)

    def get(self, ticket: Ticket, ahead: Sequence[Ticket]) -> Filled:
        rows = self._plan.rows(*ticket)
        # Keying samples must not disturb what the model draws.
        with undisturbed() if self._calls_user_code else contextlib.nullcontext():
            return fill(self._recipe, rows, self._pool.empty, hint=hint_of(self._plan, rows))

    def close(self) -> None:
        return


class ThreadCrew:
    """A pool of threads, some tickets ahead."""

    def __init__(self, plan: Plan, recipe: Recipe, threads: Threads) -> None:
        if getattr(plan, "sticky", False):
            raise ConfigError("iterables are read one item after the other: use worker processes, or none")
        self._plan, self._recipe, self._hang_s = plan, replace(recipe, seeded=False), threads.hang_s
        self.depth = threads.count * threads.ahead
        self._pool = Pool()
        keep_heap()
        self._threads = ThreadPoolExecutor(threads.count, thread_name_prefix="argosy-data")
        self._asked: dict[Ticket, Future[Filled]] = {}

    def get(self, ticket: Ticket, ahead: Sequence[Ticket]) -> Filled:
        wanted = [ticket, *ahead]
        for other in [each for each in self._asked if each not in wanted]:
            self._asked.pop(other).cancel()
        for each in wanted:
            if each not in self._asked:
                rows = self._plan.rows(*each)
                self._asked[each] = self._threads.submit(fill, self._recipe, rows, self._pool.empty)
        try:
            return self._asked[ticket].result(timeout=self._hang_s)
        except FutureTimeout:
            raise WorkerLost(
                f"a thread has worked for {self._hang_s:g} s on the samples at {ticket.start}",
                hint="a thread cannot be ended: use worker processes, or a longer hang_s",
            ) from None
        finally:
            self._asked.pop(ticket, None)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
