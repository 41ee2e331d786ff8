"""How far a host's clock is ahead follows from beats, whatever their delays."""

import math
import random

import pytest

from argosy.supervise.agent.host_clock import ClockBounds


@pytest.mark.parametrize("ahead_s", [-3.0, -0.2, 0.0, 0.7, 40.0])
def test_the_difference_is_found_through_delays(ahead_s: float):
    chance, bounds, ahead_max = random.Random(7), ClockBounds(), math.inf
    for beat in range(200):
        now = 1000.0 + beat / 2
        ahead_max = min(ahead_max, now + chance.expovariate(20) + ahead_s - now)  # Of a beat of the head.
        bounds.hear(now + ahead_s, ahead_max, now + chance.expovariate(20))
    assert bounds.low <= ahead_s <= bounds.high
    assert abs(bounds.ahead_s - ahead_s) < 0.02


def test_what_delays_explain_is_no_difference_and_nothing_is_noted():
    bounds = ClockBounds()
    bounds.hear(1000.0, 0.4, 1000.3)
    assert bounds.ahead_s == 0
    assert not bounds.changed()


def test_a_difference_is_noted_once():
    bounds = ClockBounds()
    bounds.hear(1010.0, 10.1, 1000.0)
    assert bounds.changed()
    bounds.hear(1010.5, 10.1, 1000.5)
    assert not bounds.changed()
