"""The worker processes of a loader: they work ahead; a dead or hung one is replaced, and its work is repeated.

Everything happens inside the loader's calls: there is no thread in the training process.

P1  Every microbatch is made, whichever workers die, unless its own samples cost `tries` workers.
P2  At most `ahead` microbatches per worker are requested in advance, and at most about `bytes_ahead` bytes are kept.
"""

import itertools
import os
import select
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from argosy.core import ConfigError, WaitStatus
from argosy.data.batch_makers import MicrobatchSpan
from argosy.data.errors import WorkerLost
from argosy.data.microbatch import Microbatch, MicrobatchRecipe
from argosy.data.pickled_source import pickle_shared
from argosy.data.plan import Rows, SourcePlan
from argosy.data.worker_handle import WorkerAnswer, WorkerHandle
from argosy.data.worker_messages import IDLE
from argosy.data.worker_template import WorkerTemplate

_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Processes:
    """Make batches in `count` worker processes."""

    count: int
    ahead: int = 2
    """Microbatches made ahead, per process."""
    hang_s: float = 300.0
    """A worker that takes longer for one sample is considered hung."""
    tries: int = 3
    """How many workers one microbatch may lose, and how many starts may fail."""
    bytes_ahead: int = 1 << 30

    def __post_init__(self) -> None:
        if self.count < 1 or self.ahead < 1 or self.tries < 1:
            raise ConfigError(f"count, ahead and tries must be at least 1: {self}")
        if self.hang_s <= 0:
            raise ConfigError(f"hang_s must be positive: {self.hang_s}")


class ProcessMaker:
    """The workers and the microbatches that they were asked for."""

    def __init__(self, plan: SourcePlan, recipe: MicrobatchRecipe, config: Processes) -> None:
        self._plan, self._recipe, self._config = plan, recipe, config
        self.depth = config.count * config.ahead
        self._source_fd = pickle_shared(recipe)
        self._numbers = itertools.count()
        self._rows: dict[int, tuple[MicrobatchSpan, Rows]] = {}
        """The microbatches asked for, by request number."""
        self._ready: dict[MicrobatchSpan, WorkerAnswer] = {}
        self._losses: dict[MicrobatchSpan, list[str]] = {}
        self._owner = os.getpid()
        self._members_made = itertools.count()
        self._template = WorkerTemplate(self._source_fd, config.tries)
        self._workers = [self._hire() for _ in range(config.count)]

    def _hire(self) -> WorkerHandle:
        return WorkerHandle(self._template, next(self._members_made))

    def get(self, span: MicrobatchSpan, ahead: Sequence[MicrobatchSpan]) -> Microbatch:
        """Return the microbatch, and keep the workers busy with those ahead."""
        wanted = [span, *ahead]
        self._forget_others(set(wanted))
        while span not in self._ready:
            self._ask(wanted)
            self._listen()
        answer = self._ready.pop(span)
        self._losses.pop(span, None)
        self._ask(ahead)
        return answer.unwrap()

    def close(self) -> None:
        """End all workers; in a forked child, only close its descriptors of them."""
        self._ready.clear()
        mine = os.getpid() == self._owner
        for worker in self._workers:
            if mine:
                worker.kill()
            worker.close()
        self._workers.clear()
        self._template.close(end=mine)
        os.close(self._source_fd)

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers."""
        return [worker.pid for worker in self._workers if worker.pid is not None]

    def _forget_others(self, wanted: set[MicrobatchSpan]) -> None:
        for span in [each for each in self._ready if each not in wanted]:
            del self._ready[span]
        for number in [number for number, (span, _) in self._rows.items() if span not in wanted]:
            del self._rows[number]  # Drops its answer.

    def _ask(self, wanted: Sequence[MicrobatchSpan]) -> None:
        """Assign the spans that no worker works on, in order, each to the worker with the fewest."""
        open_spans = {span for span, _ in self._rows.values()}
        ready_bytes = sum(answer.size for answer in self._ready.values())
        for span in wanted:
            if span in open_spans or span in self._ready:
                continue
            urgent = span is wanted[0]
            if not urgent and ready_bytes > self._config.bytes_ahead:
                return
            rows = self._plan.rows(*span)
            worker = self._choose(rows)
            if not urgent and len(worker.asked) > self._config.ahead:
                return
            number = next(self._numbers)
            self._rows[number] = (span, rows)
            worker.ask(number, rows, self._plan.hint(rows))

    def _choose(self, rows: Rows) -> WorkerHandle:
        if self._plan.sticky:
            return self._workers[int(rows[0, 0]) % len(self._workers)]
        return min(self._workers, key=lambda worker: len(worker.asked))

    def _listen(self) -> None:
        """Wait for an answer or the end of a worker, then check for hung workers."""
        poller = select.poll()
        for link in (self._template.link, *(worker.link for worker in self._workers if worker.listens)):
            poller.register(link, select.POLLIN | (select.POLLOUT if link.wants_write else 0))
        poller.poll(min(_POLL_S, self._config.hang_s / 4) * 1000)
        template_lives = self._template.read_reports()
        now = time.monotonic()
        for place, worker in enumerate(self._workers):
            for answer in worker.answers():
                self._take(answer)
            if (status := worker.ended()) is not None:
                self._replace(place, f"ended: {status}", status)
            elif worker.silent_s(now) > self._config.hang_s:
                worker.kill()
                self._replace(place, f"took more than {self._config.hang_s:g} s and was killed", None)
            elif not template_lives and worker.pid is None:
                self._replace(place, "did not start", None)

    def _take(self, answer: WorkerAnswer) -> None:
        asked = self._rows.pop(answer.number, None)
        if asked is not None:
            answer.rows = asked[1]
            self._ready[asked[0]] = answer

    def _replace(self, place: int, how: str, status: WaitStatus | None) -> None:
        """Replace a lost worker; its microbatches are assigned again.

        Raises:
            WorkerLost: the microbatch that it worked on has cost `tries` workers.
        """
        lost = self._workers[place]
        number, sample = lost.working_on()
        asked = self._rows.get(number)
        for each in lost.asked:
            self._rows.pop(each, None)
        lost.close()
        self._workers[place] = self._hire()
        if asked is None or number == IDLE:
            return
        span, rows = asked
        where = self._recipe.reader.where(rows, sample)
        losses = self._losses.setdefault(span, [])
        losses.append(f"at {where} a worker {how}")
        if len(losses) >= self._config.tries:
            killed = status is not None and status.signal == signal.SIGKILL
            hint = "the kernel sends SIGKILL when memory runs out: use fewer workers" if killed else ""
            lines = "\n  ".join(losses)
            raise WorkerLost(f"{len(losses)} workers were lost over one microbatch:\n  {lines}", hint=hint)
