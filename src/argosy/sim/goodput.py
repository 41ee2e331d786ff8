"""Goodput of a long run: the shipped decisions about restarts and checkpoints, on virtual time.

When to save is `checkpoint.Cadence`, how the failure rate is learned is `checkpoint.failure_rate`, what follows from a
failure is `control.decide_restart`. Hosts fail independently of each other; a failed host is repaired and becomes a
spare. Pure: the caller passes the seed.
"""

import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from argosy.checkpoint import Cadence, best_interval_s, failure_rate
from argosy.control import Budget, Failure, Restart, RestartAfter, charge, decide_restart
from argosy.core import ConfigError

DAY_S = 86_400.0
CAUSES = ("saving", "redone steps", "detection", "restart", "no spare", "gave up")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """What a run stands on, and what failures and saves cost. Seconds, unless the name says otherwise."""

    hosts: int
    step_s: float
    days: float = 30.0
    spares: int = 0
    mtbf_host_days: float = 365.0
    """Mean time between failures of one host."""
    save_s: float = 10.0
    """Training time that one checkpoint costs."""
    detect_s: float = 2.0
    restart_s: float = 60.0
    """From the decision to the first step, with a spare host at hand."""
    repair_s: float = 4 * 3600.0
    heals: bool = False
    """Whether a replaced rank takes its state from the others, so that a failure costs the step in flight alone."""
    cadence: Cadence = field(default_factory=Cadence)
    restart: Restart = field(default_factory=lambda: Restart(policy="rank"))
    operator_s: float = 1800.0
    """How long a run that gave up waits until a person starts it again."""

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.spares < 0:
            raise ConfigError(f"at least one host and no negative spares: {self.hosts}, {self.spares}")
        if min(self.step_s, self.days, self.mtbf_host_days) <= 0:
            raise ConfigError("a step, the days and the time between failures must be positive")
        if min(self.save_s, self.detect_s, self.restart_s, self.repair_s, self.operator_s) < 0:
            raise ConfigError("costs must not be negative")


@dataclass(frozen=True, slots=True)
class Goodput:
    """How the time of one simulated run was spent."""

    goodput: float
    """The share of the time that went into steps that counted."""
    lost: dict[str, float]
    """The share of the time by cause."""
    failures: int
    restarts: int
    gave_up: int
    interval_steps: int
    """Steps between checkpoints, as the cadence chose them last."""


@dataclass(slots=True)
class _Clock:
    """Where a simulated run is."""

    now: float = 0.0
    step: int = 0
    saved: int = 0
    since: int = 0
    """The step at which the last restart began."""
    good: float = 0.0
    lost: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))

    def spend(self, cause: str, seconds: float) -> None:
        self.now += seconds
        self.lost[cause] += seconds


def failure_times(fleet: Fleet, draw: random.Random) -> Iterator[float]:
    """When some host of the run fails; which one does not matter to the others."""
    now = 0.0
    while True:
        now += draw.expovariate(fleet.hosts / (fleet.mtbf_host_days * DAY_S))
        yield now


def sim_goodput(fleet: Fleet, seed: int = 0) -> Goodput:
    """Simulate one run of `fleet.days`."""
    draw, clock, budget = random.Random(seed), _Clock(), Budget()
    end, free, repaired = fleet.days * DAY_S, fleet.spares, list[float]()
    failures = restarts = gave_up = 0
    interval = choose_interval(fleet, 0, 0.0)
    for at in failure_times(fleet, draw):
        train(fleet, clock, interval, min(at, end))
        if at >= end or clock.now >= end:
            break
        if at < clock.now:
            continue  # The run was down: the host was not part of it.
        failures += 1
        progressed = clock.step > clock.since
        undo(fleet, clock)
        clock.spend("detection", fleet.detect_s)
        index = draw.randrange(fleet.hosts)
        budget = charge(budget, Failure(index, clock.now, progressed, "host lost", restarts, managed=True))
        decision = decide_restart(fleet.restart, budget, {"rank": fleet.hosts})
        while repaired and repaired[0] <= clock.now:
            free, _ = free + 1, heapq.heappop(repaired)
        heapq.heappush(repaired, clock.now + fleet.repair_s)
        if isinstance(decision, RestartAfter):
            clock.spend("restart", decision.delay_s)
            restarts += 1
        else:
            clock.spend("gave up", fleet.operator_s)
            gave_up, budget = gave_up + 1, Budget()
        if free:
            free -= 1
        else:
            clock.spend("no spare", max(0.0, heapq.heappop(repaired) - clock.now))
        clock.spend("restart", fleet.restart_s)
        clock.since = clock.step
        interval = choose_interval(fleet, failures, clock.now / DAY_S)
    whole = max(clock.now, end)
    lost = {cause: seconds / whole for cause, seconds in clock.lost.items()}
    return Goodput(clock.good / whole, lost, failures, restarts, gave_up, interval)


def choose_interval(fleet: Fleet, failures: int, days: float) -> int:
    """Steps between saves, as the shipped cadence chooses them from what was seen so far."""
    rate = failure_rate(fleet.cadence.failures_per_day, failures, days)
    return fleet.cadence.steps(fleet.step_s, fleet.save_s, rate)


def train(fleet: Fleet, clock: _Clock, interval: int, until: float) -> None:
    """Make steps and checkpoints until then; the step in flight ends nowhere. O(1): whole cycles are skipped over."""
    left = until - clock.now
    if left <= 0:
        return
    cycle_s = interval * fleet.step_s + fleet.save_s
    first = max(0, interval - (clock.step - clock.saved))
    if left < first * fleet.step_s + fleet.save_s:
        advance(fleet, clock, min(first, int(left / fleet.step_s)), until)
        return
    advance(fleet, clock, first, clock.now + first * fleet.step_s)
    save(fleet, clock)
    cycles = int((until - clock.now) / cycle_s)
    clock.step += cycles * interval
    clock.saved = clock.step
    clock.good += cycles * interval * fleet.step_s
    clock.now += cycles * interval * fleet.step_s
    clock.spend("saving", cycles * fleet.save_s)
    advance(fleet, clock, min(interval, int((until - clock.now) / fleet.step_s)), until)


def advance(fleet: Fleet, clock: _Clock, steps: int, until: float) -> None:
    """Make so many steps; what is left of the time is a step, or a save, that a failure cuts off."""
    clock.step += steps
    clock.good += steps * fleet.step_s
    clock.now += steps * fleet.step_s
    clock.spend("redone steps", max(0.0, until - clock.now))


def save(fleet: Fleet, clock: _Clock) -> None:
    clock.saved = clock.step
    clock.spend("saving", fleet.save_s)


def undo(fleet: Fleet, clock: _Clock) -> None:
    """What a failure takes back: the steps since the last checkpoint, or nothing if the others have the state."""
    if fleet.heals:
        return
    seconds = (clock.step - clock.saved) * fleet.step_s
    clock.good -= seconds
    clock.lost["redone steps"] += seconds
    clock.step = clock.saved


@dataclass(frozen=True, slots=True)
class GoodputRange:
    """Several seeds: the median, and the interval that holds 80% of them."""

    median: float
    low: float
    high: float
    typical: Goodput


def sample_goodput(fleet: Fleet, seeds: int = 20) -> GoodputRange:
    """Simulate several runs that differ in when hosts fail."""
    runs = sorted((sim_goodput(fleet, seed) for seed in range(seeds)), key=lambda each: each.goodput)
    tenth = seeds // 10
    middle = runs[seeds // 2]
    return GoodputRange(middle.goodput, runs[tenth].goodput, runs[-1 - tenth].goodput, middle)


def choose_spares(fleet: Fleet, most: int = 64, worth: float = 0.001, seeds: int = 10) -> int:
    """The smallest number of spare hosts that is within `worth` of the goodput of `most`.

    More spares never hurt, so the number is found by halving.
    """
    best = sample_goodput(replace(fleet, spares=most), seeds).median
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        if sample_goodput(replace(fleet, spares=middle), seeds).median >= best - worth:
            high = middle
        else:
            low = middle + 1
    return low


def choose_every(fleet: Fleet, seeds: int = 10) -> tuple[int, float]:
    """Steps between checkpoints with the best simulated goodput, near what Young and Daly's formula says."""
    rate = fleet.hosts / (fleet.mtbf_host_days * DAY_S)
    start = max(1.0, best_interval_s(max(fleet.save_s, 1e-3), rate) / fleet.step_s)
    tried = sorted({max(1, round(start * factor)) for factor in (0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0)})
    found = [
        (sample_goodput(replace(fleet, cadence=Cadence(every_steps=every)), seeds).median, every) for every in tried
    ]
    goodput, every = max(found)
    return every, goodput
