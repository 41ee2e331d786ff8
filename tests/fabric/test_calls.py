"""The two ends of calls on a simulated machine: links cut, ranks killed and replaced, cancelled and late calls."""

import heapq
import random
from dataclasses import dataclass, field

from seeds import each

from argosy.fabric import Call, Callee, Caller
from argosy.fabric.calls import IN_FLIGHT_MAX
from argosy.fabric.frames import CANCELLED, LATE, RESULT, STALE, Body


def call(number: int, generation: int = -1, deadline: float = 0.0) -> Call:
    return Call(number, generation, "actor", "method", Body(), deadline)


def test_c1_a_second_answer_settles_nothing():
    caller: Caller[str] = Caller()
    number = caller.begin("ticket")
    assert caller.greeted(0)
    assert caller.answered(0, number) == "ticket"
    assert caller.answered(0, number) is None


def test_c2_an_old_generation_is_not_heard():
    caller: Caller[str] = Caller()
    caller.greeted(1)
    number = caller.begin("ticket")
    assert not caller.greeted(0)
    assert caller.answered(0, number) is None
    caller.over(1)
    assert caller.answered(1, number) is None
    assert caller.lost() == ["ticket"]


def test_c3_a_call_that_came_before_is_not_run_again():
    callee = Callee(0)
    assert [callee.arrived(call(number)) for number in (1, 2, 2, 1, 3)] == [True, True, False, False, True]


def test_c4_cancelled_late_and_stale_calls_are_refused():
    callee = Callee(3)
    callee.cancel(7)
    assert callee.admit(call(7), 0.0) == CANCELLED
    assert callee.admit(call(7), 0.0) is None
    assert callee.admit(call(8, deadline=5.0), 5.0) == LATE
    assert callee.admit(call(8, deadline=5.0), 4.9) is None
    assert callee.admit(call(9, generation=2), 0.0) == STALE
    assert callee.admit(call(9, generation=3), 0.0) is None


def test_calls_in_flight_are_bounded():
    caller: Caller[int] = Caller()
    for number in range(IN_FLIGHT_MAX):
        assert not caller.is_full
        caller.begin(number)
    assert caller.is_full
    caller.give_up(1)
    assert not caller.is_full


@dataclass
class Ticket:
    """One call of the simulated caller."""

    name: int
    deadline: float
    outcomes: list[str] = field(default_factory=list[str])
    ran: list[int] = field(default_factory=list[int])


class World:
    """A caller and a slot on virtual time: messages are delayed, links cut, generations killed and replaced."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.events: list[tuple[float, int, object]] = []
        self.count = 0
        self.caller: Caller[Ticket] = Caller()
        self.tickets: list[Ticket] = []
        self.generation = 0
        self.alive = True
        self.callee = Callee(0)
        self.link = 0
        """Grows with every connection; what an older one carries arrives nowhere, except at its own end."""
        self.connected = False
        self.heard = 0
        """The newest generation that the caller knows of."""
        self.in_order: dict[tuple[str, int], float] = {}

    def at(self, delay: float, *event: object) -> None:
        self.count += 1
        heapq.heappush(self.events, (self.now + delay, self.count, event))

    def send(self, direction: str, *event: object) -> None:
        """In order on one link, delayed at random."""
        key = (direction, self.link)
        when = max(self.now + self.random.expovariate(20), self.in_order.get(key, 0.0) + 1e-9)
        self.in_order[key] = when
        self.at(when - self.now, direction, self.link, *event)

    def run(self) -> None:
        for number in range(60):
            self.at(self.random.uniform(0, 10), "make", number)
        for _ in range(self.random.randrange(6)):
            self.at(self.random.uniform(0, 12), "kill")
        for _ in range(self.random.randrange(3)):
            self.at(self.random.uniform(0, 12), "cut")
        while self.events:
            at, _, event = heapq.heappop(self.events)
            assert at < 1000, "it does not end"
            self.now = max(self.now, at)
            self.step(*event)  # pyright: ignore[reportGeneralTypeIssues]

    def step(self, kind: str, *rest: object) -> None:
        getattr(self, f"on_{kind}")(*rest)

    # --- the caller

    def on_make(self, name: int) -> None:
        if not self.connected:
            if not self.alive:
                self.at(0.1, "make", name)
                return
            self.connected = True
            self.link += 1
            self.callee = Callee(self.generation)
            self.send("back", "hello", self.generation)
        deadline = self.now + self.random.uniform(0.05, 2) if self.random.random() < 0.4 else 0.0
        ticket = Ticket(name, deadline)
        self.tickets.append(ticket)
        number = self.caller.begin(ticket)
        self.send("forth", "call", call(number, self.caller.generation, deadline), ticket)
        if self.random.random() < 0.1:
            self.send("forth", "call", call(number, self.caller.generation, deadline), ticket)  # Twice.
        if deadline:
            self.at(deadline - self.now, "expire", self.link, number)
        if self.random.random() < 0.1:
            self.at(self.random.uniform(0, 1), "cancel", self.link, number)

    def on_expire(self, link: int, number: int) -> None:
        if link == self.link and (ticket := self.caller.give_up(number)) is not None:
            ticket.outcomes.append("deadline")

    def on_cancel(self, link: int, number: int) -> None:
        if link == self.link and (ticket := self.caller.give_up(number)) is not None:
            ticket.outcomes.append("cancelled")
            self.callee.cancel(number)

    def on_back(self, link: int, kind: str, *rest: object) -> None:
        if kind == "eof":
            if link == self.link and self.connected:
                self.connected = False
                over = rest[0]
                if isinstance(over, int) and over >= 0:
                    self.caller.over(over)
                    self.heard = over + 1
                for ticket in self.caller.lost():
                    ticket.outcomes.append("lost")
            return
        if link != self.link or not self.connected:
            return
        if kind == "hello":
            self.heard = int(str(rest[0]))
            assert self.caller.greeted(self.heard)
        else:
            generation, number, outcome, ran_by = rest
            assert isinstance(generation, int)
            assert isinstance(number, int)
            if (ticket := self.caller.answered(generation, number)) is not None:
                ticket.outcomes.append(str(outcome))
                assert ran_by is None or int(str(ran_by)) >= self.heard, "answered by an old generation"

    # --- the slot

    def on_forth(self, link: int, kind: str, message: Call, ticket: Ticket) -> None:
        if link != self.link or not self.alive or not self.connected:
            return
        if not self.callee.arrived(message):
            return
        refusal = self.callee.admit(message, self.now)
        if refusal is None:
            ticket.ran.append(self.generation)
            self.send("back", "reply", self.generation, message.id, RESULT, self.generation)
        else:
            self.send("back", "reply", self.generation, message.id, refusal, None)

    def on_kill(self) -> None:
        if self.alive:
            self.alive = False
            self.send("back", "eof", self.generation)
            self.at(self.random.uniform(0.01, 1), "replace")

    def on_replace(self) -> None:
        assert not self.alive, "two generations live"
        self.generation, self.alive = self.generation + 1, True

    def on_cut(self) -> None:
        if self.connected and self.alive:
            self.send("back", "eof", -1)


@each("seed", range(300))
def test_every_call_ends_once_and_runs_at_most_once(seed: int):
    world = World(seed)
    world.run()
    assert len(world.tickets) == 60
    for ticket in world.tickets:
        assert len(ticket.outcomes) == 1, (seed, ticket)
        assert len(ticket.ran) <= 1, (seed, ticket)
        if ticket.outcomes == [str(RESULT)]:
            assert len(ticket.ran) == 1
