"""Measure how long a training waits for its input: on its progress page, as spans, and as totals."""

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from argosy.observe import Activity, attached, span


@dataclass(slots=True)
class Waits:
    """Number, total and maximum of the waits for data."""

    count: int = 0
    total_s: float = 0.0
    longest_s: float = 0.0

    @contextmanager
    def measure(self, step: int) -> Generator[None]:
        """Measure the block as a wait for the data of a step."""
        page, began = attached(), time.perf_counter()
        page.enter(Activity.DATA)
        try:
            with span("data", step):
                yield
        finally:
            page.enter(Activity.NOTHING)
            seconds = time.perf_counter() - began
            self.count += 1
            self.total_s += seconds
            self.longest_s = max(self.longest_s, seconds)
