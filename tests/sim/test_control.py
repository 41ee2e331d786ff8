"""Runs on simulated hosts whose agents are killed anywhere: every run ends once, as it should."""

import random

import pytest

from argosy.control import facts
from argosy.sim import PROFILES, FleetPlan, FleetResult, live, live_with_lost_hosts, random_life, sim_fleet


def test_every_run_ends_on_one_host_or_many():
    for seed in range(300):
        live(seed)


def test_every_run_ends_wherever_its_agents_are_killed():
    for seed in range(300):
        points = live(seed).world.points
        rng = random.Random(seed)
        for _ in range(3):
            live(seed, crash_at={rng.randrange(1, points + 1)})


def test_every_run_ends_though_its_agents_are_killed_again_and_again():
    for seed in range(200):
        live(seed, crash_at=set(random.Random(seed).sample(range(1, 200), 25)))


def test_every_run_ends_though_hosts_are_lost_or_cut_off():
    runs = [live_with_lost_hosts(seed) for seed in range(400)]
    lost = [fact for run in runs for fact in run.told if isinstance(fact, facts.HostLost)]
    assert any(fact.spare and fact.ranks for fact in lost)
    assert any(not fact.spare and fact.ranks for fact in lost)
    assert any("silent" in fact.reason for fact in lost)


def test_every_run_ends_though_hosts_are_lost_and_agents_are_killed():
    for seed in range(300):
        live_with_lost_hosts(seed, crash_at=set(random.Random(seed).sample(range(1, 300), 15)))


def test_a_seed_gives_the_same_life_event_for_event():
    for seed in range(20):
        assert random_life(seed).world.digest == random_life(seed).world.digest
    assert random_life(1).world.digest != random_life(2).world.digest


def a_fleet(
    seed: int, *, hosts: int = 3000, hours: float = 24.0, spare_hosts: int = 20, fold: bool = True
) -> FleetResult:
    plan = FleetPlan(hosts=hosts, ranks_per_host=2, hours=hours, spare_hosts=spare_hosts)
    return sim_fleet(seed, PROFILES["llama3"], plan, fold=fold)


def test_a_fleet_survives_what_llama_3_met():
    found = a_fleet(1)
    assert set(found.struck) == {"cut", "power", "rank"}
    assert found.hosts_lost > 0
    assert found.ranks_replaced >= found.restarts > 0
    assert (found.code, found.reason) == (0, "every rank ended with exit code 0")
    assert a_fleet(1) == found


def test_a_fleet_without_spare_hosts_ends_with_the_first_that_is_lost():
    found = a_fleet(1, spare_hosts=0)
    assert found.code == 1
    assert "there is no spare host" in found.reason


def test_hosts_of_equal_fate_share_one_simulation_with_the_same_outcome():
    folded, whole = a_fleet(3, hosts=200, hours=200.0), a_fleet(3, hosts=200, hours=200.0, fold=False)
    assert folded.simulated < whole.simulated
    for name in ("struck", "hosts_lost", "ranks_replaced", "restarts", "code", "reason"):
        assert getattr(folded, name) == getattr(whole, name)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_every_run_ends_though_its_agents_are_killed_at_any_single_record_or_effect(capsys: pytest.CaptureFixture[str]):
    lives = 0
    for seed in range(300):
        points = live(seed).world.points
        for point in range(1, points + 1):
            live(seed, crash_at={point})
        lives += points
    with capsys.disabled():
        print(f"\n{lives} lives of 300 seeds, each killed at another record or effect: every run ended once")


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ten_thousand_seeds(capsys: pytest.CaptureFixture[str]):
    for seed in range(10_000):
        random_life(seed)
    with capsys.disabled():
        print("\n10,000 random lives without a violation")
