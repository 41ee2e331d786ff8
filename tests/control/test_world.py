"""Runs on one to five simulated hosts, whose agents are killed anywhere: every run ends once, as it should."""

import itertools
import random
import signal
from collections.abc import Container
from functools import partial

import pytest
from control.lost_hosts import lose_host
from control.world import World

from argosy.control import facts
from argosy.control.restart import Restart
from argosy.control.run_events import ClientLeft, Finish, Hung, RunEvent, StopWanted
from argosy.core import RankId

POLICIES = [
    Restart.never(),
    Restart.all(3),
    Restart.rank(4),
    Restart.rank(),
    Restart.group("one", 2),
    Restart(policy="auto"),
    Restart(policy="all", max_restarts=2, startup_max=2),
]


def live_with_lost_hosts(seed: int, crash_at: Container[int] = ()) -> World:
    """One life of a run on hosts of which some are lost or cut off, with none to two spare hosts."""
    rng = random.Random(seed * 11 + 3)
    hosts, restart = rng.choice([2, 3, 4]), POLICIES[seed % len(POLICIES)]
    ranks = 2 * hosts if restart.along else hosts + rng.randrange(3)
    world = World(seed, hosts=hosts, ranks=ranks, restart=restart, crash_at=crash_at, spare_hosts=rng.randrange(3))
    names = [each.name for each in world.hosts[1:]]
    for name in rng.sample(names, min(len(names), rng.choice([1, 1, 2]))):
        world.after(rng.uniform(0, 40), partial(lose_host, world, name, power=rng.random() < 0.5))
    stops: list[tuple[float, RunEvent]] = []
    if rng.random() < 0.2:
        stops = [(rng.uniform(0, 60), StopWanted("you", signal.SIGTERM))]
    check_end(world, world.run(stops))
    return world


def live(seed: int, crash_at: Container[int] = ()) -> World:
    """One life of a run, with its invariants checked."""
    rng = random.Random(seed * 7 + 1)
    hosts = rng.choice([1, 1, 2, 3, 4, 5])
    restart = POLICIES[seed % len(POLICIES)]
    ranks = 2 * hosts if restart.along else hosts + rng.randrange(3)
    world = World(seed, hosts=hosts, ranks=ranks, restart=restart, crash_at=crash_at)
    stops: list[tuple[float, RunEvent]] = []
    if rng.random() < 0.3:
        stops = [(rng.uniform(0, 60), StopWanted("you", signal.SIGTERM)) for _ in range(rng.choice([1, 2]))]
    if rng.random() < 0.2:
        stops.append((rng.uniform(5, 60), Hung(0, "hung")))
    if not world.launched.launch.detached and rng.random() < 0.1:
        stops.append((rng.uniform(0, 60), ClientLeft()))
    check_end(world, world.run(stops))
    return world


def check_end(world: World, end: Finish) -> None:
    """The run ended as it should: nobody is left, in its budget, with the code and the name of the first failure."""
    seed = world.seed
    living = [p.rank for agent in world.agents.values() for p in agent.processes if p.status is None]
    assert not living, f"seed {seed}: {living} outlive the run"
    restarting = [fact for fact in world.told if isinstance(fact, facts.Restarting)]
    at_once = sum(after.at - before.at < 1.0 for before, after in itertools.pairwise(restarting))
    if world.restart.max_restarts is not None:
        assert len(restarting) - at_once <= world.restart.max_restarts, f"seed {seed}"
    last = {index: max((f.generation for f in restarting if index in f.ranks), default=0) for index in world.indices}
    exits = [fact for fact in world.told if isinstance(fact, facts.RankExited)]
    failed = [exit for exit in exits if not exit.status.ok and not exit.asked]
    final = [exit for exit in failed if exit.rank.generation == last[exit.rank.index]]
    if end.reason.startswith("rank") and "hung" not in end.reason:
        assert final, f"seed {seed}: {end}"
        assert end.code == final[0].status.shell_code, f"seed {seed}: {end} after {final[0]}"
        assert end.reason.startswith(f"rank {final[0].rank.index}:"), f"seed {seed}: {end} after {final[0]}"
    elif end.reason.startswith("every rank"):
        done = {exit.rank for exit in exits if exit.status.ok}
        wanted = {RankId("main", index, generation) for index, generation in last.items()}
        assert end.code == 0, f"seed {seed}: {end}"
        assert done >= wanted, f"seed {seed}: {end}, but {wanted - done}"
    else:
        assert end.code != 0, f"seed {seed}: {end}"


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


def test_every_run_ends_though_hosts_are_lost_or_cut_off():
    worlds = [live_with_lost_hosts(seed) for seed in range(400)]
    lost = [fact for world in worlds for fact in world.told if isinstance(fact, facts.HostLost)]
    assert any(fact.spare and fact.ranks for fact in lost)
    assert any(not fact.spare and fact.ranks for fact in lost)
    assert any("silent" in fact.reason for fact in lost)


def test_every_run_ends_though_hosts_are_lost_and_agents_are_killed():
    for seed in range(300):
        live_with_lost_hosts(seed, crash_at=set(random.Random(seed).sample(range(1, 300), 15)))


def test_a_rank_that_was_asked_for_twice_and_refused_once_has_no_second_life():
    live(59, crash_at={64})


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_every_run_ends_though_its_agents_are_killed_at_any_single_record_or_effect(capsys: pytest.CaptureFixture[str]):
    lives = 0
    for seed in range(300):
        points = live(seed).points
        for point in range(1, points + 1):
            live(seed, crash_at={point})
        lives += points
    with capsys.disabled():
        print(f"\n{lives} lives of 300 seeds, each killed at another record or effect: every run ended once")
