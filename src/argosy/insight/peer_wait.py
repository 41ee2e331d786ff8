"""Divide the time that ranks are blocked in collectives: until the last member arrived, and after. Pure.

The time until then is a peer wait, charged to the member that arrived last and to what it did meanwhile.

W1  The seconds stay in the row of the rank that waited: only their class and blame change.
W2  Where arrivals of members are unknown or contradict the wait, all of it is `comm`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from argosy.insight.lanes import Class, Ints, Lane, Segments
from argosy.insight.store import Group

HOPS_MAX = 16
TOLERANCE_NS = 2_000_000
"""How much a wait may end before the last arrival by our clocks and still be believed."""
UNRESOLVED = len(Class)
"""A cause that could not be followed to its end."""

Process = tuple[int, int]
"""Rank and generation."""


@dataclass(slots=True)
class _Wait:
    """A wait that is divided: `last` is when the culprit arrived, `since` when the operation before was complete."""

    process: Process
    begin: int
    last: int
    since: int
    culprit: Process
    cause: int = -1
    blamed: int = -1


def divide_waits(lanes: Mapping[Process, Lane], groups: Mapping[Process, Mapping[int, Group]]) -> None:
    """Change the segments of `lanes` in place: class, culprit and cause of blocked time."""
    arrivals = _arrivals(lanes, groups)
    found: list[_Wait] = []
    for process, lane in lanes.items():
        found += _find(process, lane, groups.get(process, {}), arrivals)
    for process, lane in lanes.items():
        mine = [wait for wait in found if wait.process == process]
        lane.segments = _mark(lane.segments, mine)
    _blame(found, lanes)
    for process, lane in lanes.items():
        _write_blame(lane.segments, [wait for wait in found if wait.process == process])


def _arrivals(
    lanes: Mapping[Process, Lane], groups: Mapping[Process, Mapping[int, Group]]
) -> dict[str, dict[int, list[tuple[Process, int]]]]:
    """When each process issued each collective: by group name and number of the operation."""
    found: dict[str, dict[int, list[tuple[Process, int]]]] = {}
    for process, lane in lanes.items():
        for number, group in groups.get(process, {}).items():
            mine = (lane.issues["group"] == number) & (lane.issues["number"] > 0)
            by_number = found.setdefault(group.name, {})
            for each, at in zip(lane.issues["number"][mine].tolist(), lane.issues["time"][mine].tolist(), strict=True):
                by_number.setdefault(each, []).append((process, at))
    return found


def _find(
    process: Process,
    lane: Lane,
    groups: Mapping[int, Group],
    arrivals: Mapping[str, Mapping[int, list[tuple[Process, int]]]],
) -> list[_Wait]:
    found: list[_Wait] = []
    waits = lane.waits
    columns = (waits.begin.tolist(), waits.end.tolist(), waits.group.tolist(), waits.number.tolist())
    for begin, end, number, operation in zip(*columns, strict=True):
        group = groups.get(number)
        if group is None or group.size < 2 or not operation:
            continue
        by_number = arrivals.get(group.name, {})
        came = _complete(by_number.get(operation, []), group.size, begin)
        if came is None:
            continue
        culprit, last = max(came, key=lambda each: each[1])
        if culprit == process or last <= begin or last > end + TOLERANCE_NS:  # W2
            continue
        before = _complete(by_number.get(operation - 1, []), group.size, begin)
        since = max(at for _, at in before) if before else lane.first
        found.append(_Wait(process, begin, min(last, end), min(since, begin), culprit))
    return found


def _complete(came: list[tuple[Process, int]], size: int, near: int) -> list[tuple[Process, int]] | None:
    """The arrival of each member; of several processes of one rank, the one nearest in time. None if one is missing."""
    if len(came) > size:
        best: dict[int, tuple[Process, int]] = {}
        for process, at in came:
            known = best.get(process[0])
            if known is None or abs(at - near) < abs(known[1] - near):
                best[process[0]] = process, at
        came = list(best.values())
    return came if len(came) == size else None


def _mark(segments: Segments, waits: list[_Wait]) -> Segments:
    """Turn the blocked time before the last arrival into peer waits."""
    if not waits or not len(segments.begin):
        return segments
    begins, lasts = _column(w.begin for w in waits), _column(w.last for w in waits)
    segments = segments.split(np.concatenate([begins, lasts]))
    order = np.argsort(begins)
    place = np.searchsorted(begins[order], segments.begin, "right") - 1
    inside = (place >= 0) & (segments.end <= lasts[order][np.maximum(place, 0)])
    chosen = inside & (segments.kind == Class.COMM)
    segments.kind[chosen] = Class.PEER_WAIT
    segments.culprit[chosen] = _column(w.culprit[0] for w in waits)[order][place[chosen]]
    return segments


def _column(values: "map[int] | object") -> Ints:
    return np.array(list(values), np.int64)  # pyright: ignore[reportArgumentType, reportUnknownArgumentType]


class _Spent:
    """How much of each class a lane had spent at any time."""

    def __init__(self, segments: Segments) -> None:
        self._edges = np.append(segments.begin, segments.end[-1:])
        lengths = np.zeros((len(segments.begin) + 1, len(Class)), np.int64)
        lengths[np.arange(1, len(segments.begin) + 1), segments.kind] = segments.end - segments.begin
        self._sums = np.cumsum(lengths, axis=0)

    def at(self, times: Ints) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
        """Rows: times; columns: classes."""
        return np.stack([np.interp(times, self._edges, self._sums[:, each]) for each in range(len(Class))], axis=1)


def _blame(waits: list[_Wait], lanes: Mapping[Process, Lane]) -> None:
    """Give each wait its cause: what the culprit spent more than the waiting rank since their last collective."""
    spent = {process: _Spent(lane.segments) for process, lane in lanes.items()}
    pairs: dict[tuple[Process, Process], list[_Wait]] = {}
    for wait in waits:
        pairs.setdefault((wait.process, wait.culprit), []).append(wait)
        wait.blamed = wait.culprit[0]
    for (mine, theirs), group in pairs.items():
        since, last = _column(w.since for w in group), _column(w.last for w in group)
        more = spent[theirs].at(last) - spent[theirs].at(since) - (spent[mine].at(last) - spent[mine].at(since))
        more[:, Class.COMM] = 0
        for wait, cause in zip(group, more.argmax(axis=1).tolist(), strict=True):
            wait.cause = cause
    by_process: dict[Process, list[_Wait]] = {}
    for wait in sorted(waits, key=lambda each: each.last):
        by_process.setdefault(wait.process, []).append(wait)
    lasts = {process: [wait.last for wait in group] for process, group in by_process.items()}
    for wait in sorted(waits, key=lambda each: each.last):
        for _ in range(HOPS_MAX):
            if wait.cause != Class.PEER_WAIT:
                break
            behind = by_process.get(wait.culprit, [])
            first = int(np.searchsorted(lasts.get(wait.culprit, []), wait.since))
            earlier = [each for each in behind[first:] if each.last < wait.last][:64]
            if not earlier:
                wait.cause = UNRESOLVED
                break
            longest = max(earlier, key=lambda each: each.last - each.begin)
            wait.blamed, wait.cause = longest.blamed, longest.cause
        else:
            wait.cause = UNRESOLVED


def _write_blame(segments: Segments, waits: list[_Wait]) -> None:
    if not waits:
        return
    waits = sorted(waits, key=lambda each: each.begin)
    begins = _column(w.begin for w in waits)
    chosen = np.flatnonzero(segments.kind == Class.PEER_WAIT)
    place = np.searchsorted(begins, segments.begin[chosen], "right") - 1
    segments.culprit[chosen] = _column(w.blamed for w in waits)[place]
    segments.cause[chosen] = _column(w.cause for w in waits)[place]
