"""How often to save, from what saves and steps were measured to cost, and how often runs fail."""

import math
from collections import deque
from collections.abc import Callable
from statistics import median

from argosy.checkpoint.retention import Cadence

FIRST_STEPS = 10
"""The first save comes early: until then nobody knows what one costs."""
SETTLED = 2
"""So many steps behind a save its cost is known: the fence is in the first."""
_SEEN = 32


class Pace:
    """Measures steps and saves; rank 0 decides, and `share` gives its number to all ranks."""

    def __init__(
        self,
        cadence: Cadence,
        share: Callable[[int], int] = lambda steps: steps,
        failures: Callable[[], float] | None = None,
    ) -> None:
        self._cadence, self._share = cadence, share
        self._failures = failures or cadence.per_second
        self._steps: deque[float] = deque(maxlen=_SEEN)
        self._costs: deque[float] = deque(maxlen=_SEEN)
        self._cost = 0.0
        self._asked_at: float | None = None
        self._last = 0
        self._since: int | None = None
        self.interval = cadence.every_steps or FIRST_STEPS

    def lost(self, seconds: float) -> None:
        """Training stood still for a save."""
        self._cost += seconds

    def saved(self, step: int) -> None:
        """A save of `step` was begun."""
        self._last, self._since, self._asked_at = step, 0, None

    def due(self, step: int, now: float) -> bool:
        """Whether a save is due; called once per step."""
        if self._asked_at is not None and now > self._asked_at:
            self._steps.append(now - self._asked_at)
        self._asked_at = now
        if self._since is not None:
            self._since += 1
            if self._since == SETTLED and self._cadence.every_steps is None:
                self._costs.append(self._cost)
                self._cost, self._since = 0.0, None
                self.interval = self._share(self.choose())
        return step - self._last >= self.interval

    def choose(self) -> int:
        """Steps between saves, for the usual step and the usual save."""
        if not self._steps or not self._costs:
            return FIRST_STEPS
        return self._cadence.steps(median(self._steps), median(self._costs), self._failures())


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
