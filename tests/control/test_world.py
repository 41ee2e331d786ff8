"""Runs on one to five simulated hosts, whose agents are killed anywhere: every run ends once, as it should."""

import itertools
import random
import signal
from collections.abc import Container

import pytest
from control.world import World

from argosy.control import facts
from argosy.control.restart import Restart
from argosy.control.run_events import Hung, RunEvent, StopWanted

POLICIES = [
    Restart.never(),
    Restart.all(3),
    Restart.rank(4),
    Restart.rank(),
    Restart(policy="auto"),
    Restart(policy="all", max_restarts=2, startup_max=2),
]


def live(seed: int, crash_at: Container[int] = ()) -> World:
    """One life of a run, with its invariants checked."""
    rng = random.Random(seed * 7 + 1)
    hosts = rng.choice([1, 1, 2, 3, 5])
    restart = POLICIES[seed % len(POLICIES)]
    world = World(seed, hosts=hosts, ranks=hosts + rng.randrange(3), restart=restart, crash_at=crash_at)
    stops: list[tuple[float, RunEvent]] = []
    if rng.random() < 0.3:
        stops = [(rng.uniform(0, 60), StopWanted("you", signal.SIGTERM)) for _ in range(rng.choice([1, 2]))]
    if rng.random() < 0.2:
        stops.append((rng.uniform(5, 60), Hung(0, "hung")))
    end = world.run(stops)
    living = [p.rank for agent in world.agents.values() for p in agent.processes if p.status is None]
    assert not living, f"seed {seed}: {living} outlive the run"
    restarting = [fact for fact in world.told if isinstance(fact, facts.Restarting)]
    pairs = itertools.pairwise(restarting)
    at_once = sum(after.at - before.at < 1.0 for before, after in pairs)
    restarts = len(restarting) - at_once
    if restart.max_restarts is not None:
        assert restarts <= restart.max_restarts, f"seed {seed}"
    failed = [fact for fact in world.told if isinstance(fact, facts.RankExited) and not fact.status.ok]
    first = next((fact for fact in failed if not fact.asked), None)
    if end.reason.startswith("rank") and not restarts and "hung" not in end.reason:
        assert first is not None
        assert end.code == first.status.shell_code, f"seed {seed}: {end} after {first}"
    if end.code == 0:
        assert restarts >= len({fact.at for fact in failed if not fact.asked}) or not failed or restarts, f"seed {seed}"
    return world


def test_every_run_ends_on_one_host_or_many():
    for seed in range(300):
        live(seed)


def test_every_run_ends_wherever_its_agents_are_killed():
    for seed in range(300):
        points = live(seed).points
        rng = random.Random(seed)
        for _ in range(3):
            live(seed, crash_at={rng.randrange(1, points + 1)})


def test_every_run_ends_though_its_agents_are_killed_again_and_again():
    for seed in range(200):
        live(seed, crash_at=set(random.Random(seed).sample(range(1, 200), 25)))


@pytest.mark.soak
def test_every_run_ends_though_its_agents_are_killed_at_any_single_record_or_effect():
    for seed in range(300):
        for point in range(1, live(seed).points + 1):
            live(seed, crash_at={point})
