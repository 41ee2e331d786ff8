"""How often to save: Young's and Daly's interval, from what was measured."""

import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from argosy.checkpoint import Cadence, Saver, best_interval_s
from argosy.checkpoint.save_interval import FIRST_STEPS, Pace, failure_rate


def test_the_best_interval_is_youngs_and_dalys():
    assert best_interval_s(1.0, 1 / 86400) == pytest.approx(415, rel=0.01)
    assert Cadence(failures_per_day=1).steps(step_s=1.0, cost_s=1.0) == 415
    assert Cadence(failures_per_day=0).steps(step_s=1.0, cost_s=1.0) > 10**6
    assert Cadence(every_steps=7).steps(step_s=1.0, cost_s=1.0) == 7


def trained(pace: Pace, *, step_s: float, cost_s: float, steps: int) -> list[int]:
    """The steps that were saved when a step takes `step_s` and a save costs `cost_s`."""
    now, saved = 0.0, list[int]()
    for step in range(1, steps + 1):
        now += step_s
        if pace.due(step, now):
            saved.append(step)
            pace.saved(step)
            pace.lost(cost_s / 2)
            now += cost_s / 2
            pace.lost(cost_s / 2)  # At the fence.
            now += cost_s / 2
    return saved


def test_the_chosen_interval_follows_measured_cost_and_failures():
    saved = trained(Pace(Cadence(failures_per_day=1)), step_s=1.0, cost_s=1.0, steps=2000)
    assert saved[:2] == [FIRST_STEPS, 2 * FIRST_STEPS], "from then on it is known what a save costs"
    assert {b - a for a, b in pairwise(saved[1:])} == {415}
    dear = trained(Pace(Cadence(failures_per_day=1)), step_s=1.0, cost_s=4.0, steps=4000)
    assert dear[-1] - dear[-2] == round(best_interval_s(4.0, 1 / 86400))
    often = trained(Pace(Cadence(), failures=lambda: 24 / 86400), step_s=1.0, cost_s=1.0, steps=2000)
    assert often[-1] - often[-2] == round(best_interval_s(1.0, 24 / 86400))


def test_failures_that_were_seen_count_more_than_those_expected():
    assert failure_rate(1.0, 0, 0.0) * 86400 == pytest.approx(1.0)
    assert failure_rate(1.0, 0, 9.0) * 86400 == pytest.approx(0.1)
    assert failure_rate(1.0, 99, 9.0) * 86400 == pytest.approx(10.0)
    assert failure_rate(0.0, 0, 9.0) == 0.0
    assert failure_rate(0.0, 9, 9.0) * 86400 == pytest.approx(1.0)


def test_a_saver_measures_by_itself(tmp_path: Path):
    with Saver(tmp_path, cadence=Cadence(failures_per_day=0.001)) as saver:
        saved: list[int] = []
        for step in range(1, 40):
            time.sleep(0.003)
            if saver.due(step):
                saver.save({"a": np.zeros(1000)}, step).wait(300)
                saved.append(step)
        assert saved == [FIRST_STEPS, 2 * FIRST_STEPS]
        assert saver.interval > FIRST_STEPS, (
            "a save costs more than such a step may lose in a thousand days with one failure"
        )
