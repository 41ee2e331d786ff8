"""How fast collectives move data: bus bandwidth, as nccl-tests define it. Pure.

The time of an operation is from its last member's arrival to the end of the last wait for it; only operations that all
members issued and that somebody waited for count.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from argosy.insight.ledger import LaunchLedger
from argosy.insight.store import LaunchData

BUS_FACTOR: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda size: 2 * (size - 1) / size,
    "all_gather": lambda size: (size - 1) / size,
    "reduce_scatter": lambda size: (size - 1) / size,
    "all_to_all": lambda size: (size - 1) / size,
    "broadcast": lambda size: 1.0,
    "reduce": lambda size: 1.0,
}


class Bandwidth(msgspec.Struct, frozen=True):
    """Of one operation in one group."""

    op: str
    group: str
    count: int
    median_bytes: float
    bus_bytes_per_s: float
    """Median."""


def bus_bandwidth(launch: LaunchData, ledger: LaunchLedger) -> list[Bandwidth]:
    """One row per group and operation, the ones that moved most first."""
    arrived: dict[tuple[str, int], list[tuple[int, int, str]]] = {}
    ended: dict[tuple[str, int], int] = {}
    sizes: dict[str, int] = {}
    for process, lane in ledger.lanes.items():
        names, known = launch.processes[process].names, launch.groups.get(process, {})
        issues: Any = (lane.issues[each].tolist() for each in ("group", "number", "time", "bytes", "name"))
        rows: list[tuple[int, int, int, int, int]] = list(zip(*issues, strict=True))
        for number, operation, at, nbytes, name in rows:
            if number in known and operation and names[name] in BUS_FACTOR:
                sizes[known[number].name] = known[number].size
                arrived.setdefault((known[number].name, operation), []).append((at, nbytes, names[name]))
        waits = lane.waits
        columns = (waits.group.tolist(), waits.number.tolist(), waits.end.tolist())
        for number, operation, end in zip(*columns, strict=True):
            if number in known:
                key = known[number].name, operation
                ended[key] = max(end, ended.get(key, 0))
    found: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for key, came in arrived.items():
        group, size = key[0], sizes[key[0]]
        last, moved, op = max(at for at, _, _ in came), max(each[1] for each in came), came[0][2]
        if size > 1 and len(came) == size and moved and ended.get(key, 0) > last:
            rate = moved * BUS_FACTOR[op](size) / ((ended[key] - last) / 1e9)
            found.setdefault((op, group), []).append((moved, rate))
    made = [
        Bandwidth(op, group, len(each), float(np.median([n for n, _ in each])), float(np.median([r for _, r in each])))
        for (op, group), each in found.items()
    ]
    return sorted(made, key=lambda row: -row.count * row.median_bytes)
