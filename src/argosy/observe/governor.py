"""Keep the cost of recording collectives below 1% of the time: beyond that, only every n-th step is recorded in full.

The other steps still count their collectives on the progress page, so hangs are found as ever; they have no call site,
size or time of issue. Ranks choose powers of two, so that the steps that one records in full are full on others too.
"""

from time import perf_counter_ns

SHARE_MAX = 0.01
STEPS = 16
"""How many steps are measured before the choice is looked at again."""
EVERY_MAX = 256
DETAIL = "detail: full every n steps"
"""A counter: the choice, when it changes."""


class Governor:
    """One rank's choice."""

    def __init__(self) -> None:
        self.every = 1
        self.full = True
        """Whether the current step is recorded in full."""
        self._step = self._steps = self._cost = 0
        self._since = perf_counter_ns()

    def see(self, step: int, now: int) -> bool:
        """Notice the step in which an operation is recorded; returns whether the choice has changed."""
        if step == self._step:
            return False
        self._step = step
        self._steps += 1
        before = self.every
        if self._steps >= STEPS:
            share = self._cost / max(1, now - self._since)
            self._steps, self._cost, self._since = 0, 0, now
            if share > SHARE_MAX:
                self.every = min(EVERY_MAX, self.every * 2)
            elif share < SHARE_MAX / 4:  # Twice as much stays far enough below.
                self.every = max(1, self.every // 2)
        self.full = step % self.every == 0
        return self.every != before

    def add(self, ns: int) -> None:
        """Recording took so long."""
        self._cost += ns
