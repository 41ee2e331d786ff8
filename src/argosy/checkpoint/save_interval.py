"""How often to save, from what saves and steps were measured to cost, and how often runs fail."""

import math
from collections import deque
from collections.abc import Callable
from statistics import median

from argosy.checkpoint.retention import Cadence

FIRST_STEPS = 10
"""The first saves come early: until then nobody knows what one costs."""
_SEEN = 32


class Pace:
    """Measures steps and saves; what a save cost is known at the next. `share` gives rank 0's choice to all ranks."""

    def __init__(
        self, cadence: Cadence, share: Callable[[int], int] = int, failures: Callable[[], float] | None = None
    ) -> None:
        self._cadence, self._share, self._failures = cadence, share, failures or cadence.per_second
        self._steps: deque[float] = deque(maxlen=_SEEN)
        self._costs: deque[float] = deque(maxlen=_SEEN)
        self._asked_at: float | None = None
        self._last = 0
        self.interval = cadence.every_steps or FIRST_STEPS

    def lost(self, seconds: float) -> None:
        """Training stood still for the last save."""
        if self._costs:
            self._costs[-1] += seconds

    def saved(self, step: int) -> None:
        """A save of `step` was begun."""
        if self._costs and self._steps and self._cadence.every_steps is None:
            chosen = self._cadence.steps(median(self._steps), median(self._costs), self._failures())
            self.interval = self._share(chosen)
        self._costs.append(0.0)
        self._last, self._asked_at = step, None

    def due(self, step: int, now: float) -> bool:
        """Whether a save is due; called once per step."""
        if self._asked_at is not None and now > self._asked_at:
            self._steps.append(now - self._asked_at)
        self._asked_at = now
        return step - self._last >= self.interval


def failure_rate(per_day: float, failures: int, days: float) -> float:
    """Failures per second: what was expected of one day, and what was seen in `days`, as evidence of equal kind.

    The expectation weighs as one failure: with more of them seen it no longer counts.
    """
    if per_day <= 0 and failures == 0:
        return 0.0
    expected_days = 1 / per_day if per_day > 0 else math.inf
    if math.isinf(expected_days):
        return failures / max(days, 1e-6) / 86400
    return (1 + failures) / (expected_days + max(days, 0.0)) / 86400
