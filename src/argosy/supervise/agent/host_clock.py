"""How far the clock of a host is ahead of the head's, from the beats that both send. Nothing is assumed of delays.

What a message says of its sender's clock is at least as old as its way. So a host's beats bound the difference from
below, and the head's beats, as the host hears them, from above.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import msgspec

from argosy.supervise.records.rundir import write_atomically

STEP_S = 0.005
"""Smaller changes are not written down."""
WARN_S = 2.0
"""Logs of hosts whose clocks differ by more are hard to compare."""


@dataclass(slots=True)
class ClockBounds:
    """The difference is known to be between `low` and `high`, in seconds."""

    low: float = -math.inf
    high: float = math.inf
    noted: float = 0.0

    def hear(self, clock: float, high: float, now: float) -> None:
        """A beat: the host's clock when it was sent, and the bound from above that the host knows."""
        self.low, self.high = max(self.low, clock - now), min(self.high, high)

    @property
    def ahead_s(self) -> float:
        """0 if nothing shows that the clocks differ."""
        return 0.0 if self.low <= 0 <= self.high else (self.low + self.high) / 2

    def changed(self) -> bool:
        """Whether there is something new to be written down."""
        known = math.isfinite(self.low) and math.isfinite(self.high)
        if not known or abs(self.ahead_s - self.noted) < STEP_S:
            return False
        self.noted = self.ahead_s
        return True


def note_clock(directory: str, host: str, ahead_s: float) -> None:
    """Write the difference down, for those who compare the records of several hosts.

    Raises:
        OSError: the run's directory cannot be written to.
    """
    folder = Path(directory, "hosts", host)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "clock.json", msgspec.json.encode({"ahead_s": ahead_s}))
