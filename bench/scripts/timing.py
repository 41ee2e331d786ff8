"""Time what a contender of bench/calls.py does, and say the values: the last line is a JSON list of seconds."""

import json
import time
from collections.abc import Callable


def each(do: Callable[[], object], count: int) -> list[float]:
    """Seconds of each of `count` repeats, after a tenth as many that do not count."""
    for _ in range(max(1, count // 10)):
        do()
    values: list[float] = []
    for _ in range(count):
        began = time.perf_counter()
        do()
        values.append(time.perf_counter() - began)
    return values


def once(do: Callable[[], object], per: int = 1) -> list[float]:
    """Seconds of one try, divided by what it did."""
    began = time.perf_counter()
    do()
    return [(time.perf_counter() - began) / per]


def spin() -> None:
    """Keep the interpreter busy, as a training loop in Python would."""
    while True:
        sum(range(1000))


def available_gb() -> float:
    """Memory that is left on this machine."""
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 1e6


def say(values: list[float]) -> None:
    print(json.dumps(values), flush=True)
