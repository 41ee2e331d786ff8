"""Time for decisions: seconds since the epoch that never go back."""

import time


class Clock:
    """Starts at the wall clock's time, or at `not_before` if that is later, and advances with the monotonic clock."""

    def __init__(self, not_before: float = 0.0) -> None:
        self._offset = max(time.time(), not_before) - time.monotonic()

    def now(self) -> float:
        return time.monotonic() + self._offset
