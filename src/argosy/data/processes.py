"""Worker processes of a loader: asked ahead, replaced when they die or hang, their work asked again.

Everything happens when the loader asks: there is no thread in the training process.

P1  A ticket is answered whoever dies, unless its own samples killed `tries` workers.
P2  At most `ahead` tickets per worker are open besides the one asked for, and no more than `bytes_ahead` lie ready.
"""

import itertools
import os
import select
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from argosy.core import ConfigError, WaitStatus
from argosy.data.crew import Ticket
from argosy.data.errors import WorkerLost
from argosy.data.fill import Filled, Recipe
from argosy.data.member import Answer, Member
from argosy.data.messages import IDLE
from argosy.data.nursery import Nursery
from argosy.data.parcel import pack_parcel
from argosy.data.plan import Plan, Rows, hint_of

_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Processes:
    """Make batches in `count` processes of their own."""

    count: int
    ahead: int = 2
    """Microbatches made ahead, per process."""
    hang_s: float = 300.0
    """A worker that takes longer over one sample is taken for hung."""
    tries: int = 3
    """Workers that one microbatch may cost, and starts that may fail."""
    bytes_ahead: int = 1 << 30

    def __post_init__(self) -> None:
        if self.count < 1 or self.ahead < 1 or self.tries < 1:
            raise ConfigError(f"processes, microbatches ahead and tries are at least 1: {self}")
        if self.hang_s <= 0:
            raise ConfigError(f"hang_s is positive: {self.hang_s}")


class ProcessCrew:
    """The workers and what they were asked."""

    def __init__(self, plan: Plan, recipe: Recipe, config: Processes) -> None:
        self._plan, self._recipe, self._config = plan, recipe, config
        self.depth = config.count * config.ahead
        self._sticky = bool(getattr(plan, "sticky", False))
        self._parcel = pack_parcel(recipe)
        self._numbers = itertools.count()
        self._rows: dict[int, tuple[Ticket, Rows]] = {}
        """What is asked, by number."""
        self._ready: dict[Ticket, Answer] = {}
        self._losses: dict[Ticket, list[str]] = {}
        self._owner = os.getpid()
        self._members_made = itertools.count()
        self._nursery = Nursery(self._parcel, config.tries)
        self._members = [self._hire() for _ in range(config.count)]

    def _hire(self) -> Member:
        return Member(self._nursery, next(self._members_made))

    def get(self, ticket: Ticket, ahead: Sequence[Ticket]) -> Filled:
        """Return the microbatch, and keep the workers busy with those ahead."""
        wanted = [ticket, *ahead]
        self._forget_others(set(wanted))
        while ticket not in self._ready:
            self._ask(wanted)
            self._listen()
        answer = self._ready.pop(ticket)
        self._losses.pop(ticket, None)
        self._ask(ahead)
        return answer.unwrap()

    def close(self) -> None:
        """End all workers; in a forked child, only let go of them."""
        self._ready.clear()
        mine = os.getpid() == self._owner
        for member in self._members:
            if mine:
                member.kill()
            member.close()
        self._members.clear()
        self._nursery.close(end=mine)
        os.close(self._parcel)

    @property
    def pids(self) -> list[int]:
        """The worker processes, for those who want to watch or kill them."""
        return [member.pid for member in self._members if member.pid is not None]

    def _forget_others(self, wanted: set[Ticket]) -> None:
        for ticket in [each for each in self._ready if each not in wanted]:
            del self._ready[ticket]
        for number in [number for number, (ticket, _) in self._rows.items() if ticket not in wanted]:
            del self._rows[number]  # Its answer will be dropped.

    def _ask(self, wanted: Sequence[Ticket]) -> None:
        """Give out tickets that nobody works on, in order, to whoever has least to do."""
        open_tickets = {ticket for ticket, _ in self._rows.values()}
        ready_bytes = sum(answer.size for answer in self._ready.values())
        for ticket in wanted:
            if ticket in open_tickets or ticket in self._ready:
                continue
            urgent = ticket is wanted[0]
            if not urgent and ready_bytes > self._config.bytes_ahead:
                return
            rows = self._plan.rows(*ticket)
            member = self._choose(rows)
            if not urgent and len(member.asked) > self._config.ahead:
                return
            number = next(self._numbers)
            self._rows[number] = (ticket, rows)
            member.ask(number, rows, hint_of(self._plan, rows))

    def _choose(self, rows: Rows) -> Member:
        if self._sticky:
            return self._members[int(rows[0, 0]) % len(self._members)]
        return min(self._members, key=lambda member: len(member.asked))

    def _listen(self) -> None:
        """Wait until something happens: an answer, an end, or time to look for hung workers."""
        poller = select.poll()
        for link in (self._nursery.link, *(member.link for member in self._members if member.listens)):
            poller.register(link, select.POLLIN | (select.POLLOUT if link.wants_write else 0))
        poller.poll(min(_POLL_S, self._config.hang_s / 4) * 1000)
        template_lives = self._nursery.hear()
        now = time.monotonic()
        for place, member in enumerate(self._members):
            for answer in member.answers():
                self._take(answer)
            if (status := member.ended()) is not None:
                self._replace(place, f"ended: {status}", status)
            elif member.silent_s(now) > self._config.hang_s:
                member.kill()
                self._replace(place, f"took more than {self._config.hang_s:g} s and was ended", None)
            elif not template_lives and not member.exists:
                self._replace(place, "was never there", None)

    def _take(self, answer: Answer) -> None:
        asked = self._rows.pop(answer.number, None)
        if asked is not None:
            answer.rows = asked[1]
            self._ready[asked[0]] = answer

    def _replace(self, place: int, how: str, status: WaitStatus | None) -> None:
        """Put a new worker in the place of a lost one; what it had been asked is asked again."""
        lost = self._members[place]
        number, sample = lost.working_on()
        asked = self._rows.get(number)
        for each in lost.asked:
            self._rows.pop(each, None)
        lost.close()
        self._members[place] = self._hire()
        if asked is None or number == IDLE:
            return
        ticket, rows = asked
        where = self._recipe.reader.where(rows, sample)
        losses = self._losses.setdefault(ticket, [])
        losses.append(f"at {where} a worker {how}")
        if len(losses) >= self._config.tries:
            killed = status is not None and status.signal == signal.SIGKILL
            hint = "SIGKILL is what the kernel sends when memory runs out: use fewer workers" if killed else ""
            raise WorkerLost(
                f"{len(losses)} workers were lost over one microbatch:\n  " + "\n  ".join(losses), hint=hint
            )
