"""Time for decisions: seconds since the epoch that never go back."""

import time


class Clock:
    """Wall-clock time as it was at the start, and from then on by the monotonic clock: nobody can set it."""

    def __init__(self, not_before: float = 0.0) -> None:
        self._offset = max(time.time(), not_before) - time.monotonic()

    def now(self) -> float:
        return time.monotonic() + self._offset
