"""Measure once per machine how many float32 operations per second one core of it can do."""

import json
import os
import platform
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

SIZE = 512
REPEATS = 8


def cpu_peak() -> float:
    """Operations per second of one core in a matrix product; from the cache if it was measured before."""
    path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "argosy" / "cpu_peak.json"
    with suppress(OSError, ValueError, KeyError):
        found = json.loads(path.read_text())
        return float(found[platform.node()])
    peak = measure_cpu_peak()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({platform.node(): peak}))
    return peak


def measure_cpu_peak() -> float:
    """The best of a few products of square matrices, in this process and by as many threads as it uses."""
    a = np.ones((SIZE, SIZE), np.float32)
    best = float("inf")
    for _ in range(REPEATS):
        began = time.thread_time()
        np.matmul(a, a)
        best = min(best, time.thread_time() - began)
    return 2 * SIZE**3 / max(best, 1e-9)
