"""Verdicts name the fault that was put in, with its size, and none where nothing is wrong."""

import random

import numpy as np
import pytest
from recordings import EPOCH, MS, Recording, launch_of

from argosy.insight.ledger import ledger_of
from argosy.insight.measures import measure
from argosy.insight.store import LaunchData
from argosy.insight.verdicts import Verdict, judge

RANKS, STEPS = 4, 60


def training(seed: int, fault: str = "", ms: float = 30.0) -> LaunchData:
    """Steps of about 50 ms: data, forward, backward with a collective at its end, optimizer."""
    chance = random.Random(seed)
    ranks = [Recording(rank) for rank in range(RANKS)]
    at, leak = 100.0, list[list[float]]()
    for step in range(STEPS):
        arrive = list[float]()
        for one in ranks:
            now = at
            wait = 0.3 + (ms if fault == "data" else 0)
            one.span("data", now, now + wait)
            now += wait + 0.1 + (ms if fault == "python" else 0)
            slow = ms * STEPS if fault == "stopped" and one.rank == 2 and step == STEPS // 2 else 0
            slow += ms if fault == "straggler" and one.rank == 2 else ms * step / STEPS if fault == "slow_down" else 0
            ahead = chance.gauss(14, 1) + slow
            one.span("forward", now, now + ahead)
            now += ahead
            if fault == "gc" and one.rank == step % RANKS:
                one.span("gc", now, now + ms)
                now += ms
            if fault == "checkpoint" and one.rank == 0 and step % 5 == 0:
                one.span("checkpoint", now, now + 5 * ms)
                now += 5 * ms
            if fault == "compile" and step % 3 == 0:
                one.span("compile", now, now + ms * 3)
                now += ms * 3
            arrive.append(now + chance.gauss(20, 1))
            one.records.append((now, 1, "backward", 0, 0))
        end = max(arrive) + (ms * 2 if fault == "comm" else 2)
        for one, came in zip(ranks, arrive, strict=True):
            one.issue(came, size=4_000_000)
            one.records.append((end, 2, "backward", 0, 0))
            length = 80 if fault == "small_batch" else 5
            one.span("optimizer", end + 0.1, end + length).step(end + length)
        at = end + (80 if fault == "small_batch" else 5) + 0.2
        leak.append([at, 500e6 + (step * 20e6 if fault == "leak" else chance.gauss(0, 1e6))])
    launch = launch_of(ranks, at + 10)
    time, rss = np.array(leak).T
    zeros = np.zeros(len(time), np.int64)
    launch.samples = {
        "rank": {
            "time": EPOCH + (time * MS).astype(np.int64),
            "rank": zeros + 1,
            "generation": zeros,
            "rss_bytes": rss.astype(np.int64),
            "cpu_ns": (time * MS * 0.5).astype(np.int64),
            "main_cpu_ns": (time * MS * 0.5).astype(np.int64),
            "run_delay_ns": zeros,
        }
    }
    return launch


def verdicts(launch: LaunchData) -> list[Verdict]:
    ledger = ledger_of(launch)
    return judge(measure(launch, ledger), ledger)


def test_v1_a_clean_run_has_no_verdict():
    for seed in range(20):
        assert verdicts(training(seed)) == []


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("data", "input_bound"),
        ("straggler", "straggler"),
        ("python", "python_bound"),
        ("gc", "gc_pauses"),
        ("checkpoint", "checkpoint_bound"),
        ("compile", "recompilation"),
        ("comm", "communication_bound"),
        ("slow_down", "slow_down"),
        ("small_batch", "small_batch"),
        ("leak", "memory_growth"),
    ],
)
def test_the_first_verdict_is_the_fault(fault: str, kind: str):
    for seed in range(5):
        found = verdicts(training(seed, fault))
        assert found[0].kind == kind, [verdict.kind for verdict in found]
        assert all(text for text in (found[0].what, found[0].why, found[0].do, found[0].query))


@pytest.mark.parametrize("fault", ["data", "straggler", "python"])
def test_the_gain_is_what_the_fault_costs(fault: str):
    clean, slow = measure(*with_ledger(training(1))), measure(*with_ledger(training(1, fault)))
    assert clean is not None
    assert slow is not None
    gain = verdicts(training(1, fault))[0].gain
    assert gain == pytest.approx(1 - clean.step_s / slow.step_s, rel=0.1)


def with_ledger(launch: LaunchData):
    return launch, ledger_of(launch)


def test_one_long_stop_is_no_straggler():
    assert "straggler" not in [each.kind for each in verdicts(training(3, "stopped"))]


def test_the_straggler_is_named():
    (found, *_) = verdicts(training(3, "straggler"))
    assert found.ranks == [2]
    assert "rank 2" in found.what


def test_few_steps_are_no_basis():
    one = Recording(0)
    for step in range(8):
        one.span("data", step * 100, step * 100 + 90).step(step * 100 + 99)
    assert verdicts(launch_of([one], 900)) == []
