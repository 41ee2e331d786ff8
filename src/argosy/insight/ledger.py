"""The ledger: every nanosecond of every slot of a run in exactly one class. Pure.

G1  A row covers its slot from the beginning to the end of the launch; its classes add up to exactly that.
G2  Work that was done again or never used is LOST, whatever it was before.
G3  A rank that waits for one that is being replaced is in RESTART, blamed on it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from argosy.insight.lanes import Class, Ints, Lane, Segments, read_lane
from argosy.insight.peer_wait import divide_waits
from argosy.insight.store import LaunchData, ProcessLife, RunData

WORK = (Class.COMPUTE, Class.COMM, Class.PEER_WAIT, Class.DATA, Class.COPY, Class.HOST)
"""What becomes LOST when a step is done again."""
Process = tuple[int, int]


@dataclass(slots=True)
class Row:
    """One slot."""

    rank: int
    begin: int
    end: int
    segments: Segments

    def totals(self) -> dict[Class, int]:
        return self.segments.totals()


@dataclass(slots=True)
class Steps:
    """Columns, one row per rank and step: when the step was done, how long it took, and of that each class."""

    rank: Ints
    step: Ints
    end: Ints
    lasted: Ints
    spent: "np.ndarray[tuple[int, int], np.dtype[np.int64]]"
    """Nanoseconds by class."""
    ran: Ints
    """CPU time of the training thread."""
    delayed: Ints
    """How long it was ready to run and had no core."""
    full: "np.ndarray[tuple[int], np.dtype[np.bool_]]"
    """Whether its collectives were recorded: the cost of recording has a bound."""


@dataclass(slots=True)
class LaunchLedger:
    """The rows of one launch."""

    launch: int
    rows: list[Row]
    steps: Steps
    lanes: dict[Process, Lane] = field(default_factory=dict[Process, Lane])

    def totals(self) -> dict[Class, int]:
        """Nanoseconds by class over all slots."""
        found: dict[Class, int] = {}
        for row in self.rows:
            for each, ns in row.totals().items():
                found[each] = found.get(each, 0) + ns
        return found

    def blame(self) -> dict[tuple[int, int, int], int]:
        """Nanoseconds that a rank waited for another, by (rank, culprit, cause)."""
        found: dict[tuple[int, int, int], int] = {}
        for row in self.rows:
            part = row.segments
            for at in np.flatnonzero(part.kind == Class.PEER_WAIT).tolist():
                key = row.rank, int(part.culprit[at]), int(part.cause[at])
                found[key] = found.get(key, 0) + int(part.end[at] - part.begin[at])
        return found

    @property
    def goodput(self) -> float:
        """The share of all seconds that belongs to work which counts."""
        totals = self.totals()
        counts = sum(totals.get(each, 0) for each in WORK)
        return counts / max(1, sum(totals.values()))


def make_ledger(run: RunData) -> list[LaunchLedger]:
    """The ledgers of all launches of a run, oldest first."""
    ledgers = [ledger_of(launch) for launch in run.launches]
    for earlier, later in pairwise(ledgers):
        resumed = min((lane.resumed for lane in later.lanes.values() if len(lane.marks[1])), default=0)
        if resumed > 0:  # It continues at a later step than the first: what it does again was lost.
            for row in earlier.rows:
                _lose(row.segments, row.segments.step >= resumed)
    return ledgers


def ledger_of(launch: LaunchData) -> LaunchLedger:
    """Classify every second of one launch."""
    lives = {(life.rank, life.generation): life for life in launch.lives}
    lanes: dict[Process, Lane] = {}
    for key, process in launch.processes.items():
        life = lives.get(key)
        if life is not None and process.columns:
            lanes[key] = read_lane(process, life)
    divide_waits(lanes, launch.groups)
    rows = [_row(launch, rank, lanes) for rank in range(launch.size)]
    _charge_restarts(launch, rows, lanes)
    _find_lost(launch, rows, lanes)
    return LaunchLedger(launch.number, rows, _steps(lanes), lanes)


def _row(launch: LaunchData, rank: int, lanes: Mapping[Process, Lane]) -> Row:
    """Put the processes of a slot in a row, with what was between them."""
    lives = sorted((life for life in launch.lives if life.rank == rank), key=lambda life: life.begin)
    parts: list[Segments] = []
    at = launch.begin
    for number, life in enumerate(lives):
        begin, end = max(at, life.begin), min(max(life.end, at), launch.end)
        parts.append(_filled(at, begin, Class.RESTART if number else Class.STARTUP))
        lane = lanes.get((rank, life.generation))
        whole = Class.RESTART if number else Class.STARTUP
        parts.append(_filled(begin, end, whole) if lane is None else _cropped(lane.segments, begin, end))
        at = max(at, end)
    parts.append(_filled(at, launch.end, Class.IDLE if lives else Class.STARTUP))
    return Row(rank, launch.begin, launch.end, _joined(parts))


def _filled(begin: int, end: int, kind: Class) -> Segments:
    some = [1] if end > begin else list[int]()
    ints = [np.array([value for _ in some], np.int64) for value in (begin, end, kind, 0, -1, -1)]
    return Segments(*ints)


def _cropped(segments: Segments, begin: int, end: int) -> Segments:
    if not len(segments.begin):
        return _filled(begin, end, Class.STARTUP)
    cut = segments.split(np.array([begin, end], np.int64))
    inside = cut.within(begin, end)
    columns = (cut.begin, cut.end, cut.kind, cut.step, cut.culprit, cut.cause)
    return Segments(*(column[inside] for column in columns))


def _joined(parts: Sequence[Segments]) -> Segments:
    names = ("begin", "end", "kind", "step", "culprit", "cause")
    return Segments(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def _gaps(launch: LaunchData, lanes: Mapping[Process, Lane]) -> list[tuple[ProcessLife, int]]:
    """Each process that was replaced, and when its successor began its first step."""
    found: list[tuple[ProcessLife, int]] = []
    for life in launch.lives:
        after = [each for each in launch.lives if each.rank == life.rank and each.generation > life.generation]
        if after:
            successor = min(after, key=lambda each: each.generation)
            lane = lanes.get((successor.rank, successor.generation))
            found.append((life, lane.first if lane is not None else successor.end))
    return found


def _charge_restarts(launch: LaunchData, rows: Sequence[Row], lanes: Mapping[Process, Lane]) -> None:
    for life, until in _gaps(launch, lanes):
        for row in rows:
            if row.rank == life.rank or not len(row.segments.begin):
                continue
            again = _went_back(row.rank, lanes, life.end)
            resumed = until if again is None else again
            row.segments = part = row.segments.split(np.array([life.end, resumed], np.int64))
            # Where the step is done again, all until then is waiting for the new rank, in whatever call.
            kinds = [Class.COMM, Class.PEER_WAIT, Class.HOST] if again is None else WORK
            blocked = np.isin(part.kind, kinds) & part.within(life.end, resumed)
            part.kind[blocked], part.culprit[blocked] = Class.RESTART, life.rank  # G3


def _went_back(rank: int, lanes: Mapping[Process, Lane], since: int) -> int | None:
    """When a rank that lived on began its step again; None if it did not."""
    for (each, _), lane in lanes.items():
        times, done = lane.marks
        later = np.flatnonzero((times[1:] > since) & (times[:-1] <= since)) + 1
        if each == rank and len(later) and done[later[0]] <= done[later[0] - 1]:
            return int(times[later[0]])
    return None


def _find_lost(launch: LaunchData, rows: Sequence[Row], lanes: Mapping[Process, Lane]) -> None:
    """Work that did not count: steps that a lane went back over, and what a killed process left unfinished."""
    for row in rows:
        part = row.segments
        if not len(part.begin):
            continue
        for (rank, generation), lane in sorted(lanes.items()):
            if rank != row.rank:
                continue
            times, done = lane.marks
            for at in np.flatnonzero(done[1:] <= done[:-1]).tolist():  # It went back to step `done`.
                kept = np.flatnonzero(done[: at + 1] <= done[at + 1])
                since = int(times[kept[-1]]) if len(kept) else lane.first
                _lose(part, (part.begin >= since) & (part.end <= times[at + 1]))
            # One that was stopped before its first step did no work again.
            later = [each for each in lanes if each[0] == rank and each[1] > generation and len(lanes[each].marks[1])]
            if not later:
                continue
            next_lane = lanes[min(later)]
            ended = next(life.end for life in launch.lives if (life.rank, life.generation) == (rank, generation))
            mine = (part.begin >= lane.first) & (part.end <= ended)
            if next_lane.resumed == 0 and len(
                done
            ):  # A script that counts from 1 again: all since its last checkpoint.
                saved = lane.segments.end[lane.segments.kind == Class.CHECKPOINT]
                _lose(part, mine & (part.begin >= (int(saved[-1]) if len(saved) else 0)))
            else:
                _lose(part, mine & (part.step >= next_lane.resumed))


def _lose(part: Segments, chosen: "np.ndarray[tuple[int], np.dtype[np.bool_]]") -> None:
    chosen = chosen & np.isin(part.kind, WORK)
    part.cause[chosen] = part.kind[chosen]
    part.kind[chosen] = Class.LOST


def _steps(lanes: Mapping[Process, Lane]) -> Steps:
    """Each step of each rank: from the mark before it, or the beginning of the first, to its own mark."""
    found: list[tuple[Ints, ...]] = []
    for (rank, _), lane in sorted(lanes.items()):
        times, done = lane.marks
        if not len(times):
            continue
        edges = np.concatenate([[min(lane.first, int(times[0]))], times])
        forward = np.concatenate([[times[0] > lane.first], done[1:] > done[:-1]])
        part = lane.segments.split(edges)
        inside = (part.begin >= edges[0]) & (part.end <= edges[-1])
        place = np.searchsorted(edges, part.begin[inside], "right") - 1
        spent = np.zeros((len(times), len(Class)), np.int64)
        np.add.at(spent, (place, part.kind[inside]), (part.end - part.begin)[inside])
        # Of the first step of a process nobody knows it: the counters began before.
        ran, delayed = (np.diff(column, prepend=column[:1]) for column in (lane.ran, lane.delayed))
        full = (done - 1) % np.maximum(lane.detail, 1) == 0
        columns = (np.full(len(times), rank), done, times, np.diff(edges), spent, ran, delayed, full)
        found.append(tuple(column[forward] for column in columns))
    if not found:
        nothing = np.zeros(0, np.int64)
        return Steps(
            nothing, nothing, nothing, nothing, np.zeros((0, len(Class)), np.int64), nothing, nothing, nothing > 0
        )
    return Steps(*(np.concatenate(column) for column in zip(*found, strict=True)))
