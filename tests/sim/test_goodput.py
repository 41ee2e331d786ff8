"""Goodput on virtual time: known answers, the shipped decisions, and more of anything good never hurts."""

from dataclasses import replace

import pytest

from argosy.checkpoint import Cadence, best_interval_s
from argosy.control import Restart
from argosy.core import ConfigError
from argosy.sim import Fleet, choose_every, choose_spares, sample_goodput, sim_goodput

LLAMA = Fleet(hosts=2048, spares=64, step_s=6.0, days=54, mtbf_host_days=2048 * 54 / 419, save_s=2.0, restart_s=300.0)
"""16,384 GPUs that fail 419 times in 54 days, as Llama 3's report says."""


def test_without_failures_only_saving_costs():
    found = sim_goodput(Fleet(hosts=1, step_s=1.0, days=1, mtbf_host_days=1e9, cadence=Cadence(every_steps=90)))
    assert found.failures == 0
    assert found.goodput == pytest.approx(0.9, abs=0.001)
    assert found.lost["saving"] == pytest.approx(0.1, abs=0.001)


def test_the_time_is_accounted_for():
    for seed in range(20):
        found = sim_goodput(replace(LLAMA, days=10), seed)
        assert found.goodput + sum(found.lost.values()) == pytest.approx(1.0, abs=1e-9)
        assert found.failures == found.restarts + found.gave_up > 0


def test_a_published_run_is_above_ninety_percent():
    found = sample_goodput(LLAMA, seeds=10)
    assert 330 < found.typical.failures < 500
    assert found.low > 0.9
    assert found.low <= found.median <= found.high < 1


def test_the_shipped_decision_gives_up():
    """With one restart allowed, the rest of the failures wait for a person."""
    found = sim_goodput(replace(LLAMA, days=2, restart=Restart(policy="rank", max_restarts=1)))
    assert found.gave_up > 3
    assert found.lost["gave up"] > 0.05


def test_better_parts_never_hurt():
    base = sample_goodput(LLAMA, seeds=5).median
    for better in ({"save_s": 0.5}, {"restart_s": 30.0}, {"detect_s": 0.1}, {"heals": True}, {"repair_s": 600.0}):
        assert sample_goodput(replace(LLAMA, **better), seeds=5).median >= base - 0.002, better


def test_the_best_interval_is_near_the_formula():
    fleet = replace(LLAMA, days=20, save_s=20.0)
    every, _ = choose_every(fleet, seeds=5)
    formula = best_interval_s(20.0, 419 / (54 * 86_400)) / fleet.step_s
    assert 0.45 < every / formula < 2.1


def test_spares_are_as_few_as_needed():
    assert choose_spares(replace(LLAMA, days=10, mtbf_host_days=1e7), seeds=3) == 0
    needed = choose_spares(replace(LLAMA, days=10, mtbf_host_days=20, repair_s=86_400.0), most=256, seeds=3)
    assert 32 <= needed <= 256


def test_impossible_fleets_are_refused():
    for bad in ({"hosts": 0}, {"step_s": 0.0}, {"spares": -1}, {"save_s": -1.0}):
        with pytest.raises(ConfigError):
            Fleet(**{"hosts": 2, "step_s": 1.0, **bad})
