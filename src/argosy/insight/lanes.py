"""Turn the records of a thread into segments: consecutive pieces of time, each of exactly one class. Pure.

L1  Segments cover their range without gap or overlap, in whole nanoseconds.
L2  Of nested spans the innermost classified one decides; unclassified ones change nothing.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argosy.insight.store import ProcessLife, ProcessRecords
from argosy.observe import DETAIL, STEP_CPU, STEP_DELAY, SpanKind

Ints = NDArray[np.int64]


class Class(IntEnum):
    """What a second was spent on."""

    STARTUP = 0
    COMPUTE = 1
    COMM = 2
    """Blocked in a collective after the last member had arrived."""
    PEER_WAIT = 3
    """Blocked in a collective until the last member arrived."""
    DATA = 4
    COPY = 5
    CHECKPOINT = 6
    EVALUATION = 7
    COMPILE = 8
    GC = 9
    HOST = 10
    """Between the first and the last step, in nothing that is recorded."""
    RESTART = 11
    LOST = 12
    """Work that was thrown away: done again, or never used."""
    SPARE = 13
    IDLE = 14


CLASS_OF = {
    "forward": Class.COMPUTE,
    "backward": Class.COMPUTE,
    "optimizer": Class.COMPUTE,
    "evaluate": Class.EVALUATION,
    "data": Class.DATA,
    "wait": Class.COMM,
    "copy": Class.COPY,
    "checkpoint": Class.CHECKPOINT,
    "compile": Class.COMPILE,
    "gc": Class.GC,
}
"""By name of the span."""
COLLECTIVES = frozenset({"all_gather", "all_reduce", "all_to_all", "barrier", "reduce_scatter"})
"""Operations that end for nobody before all have begun."""
ONE_WAY = frozenset({"broadcast", "gather", "reduce", "scatter", "send", "recv"})


@dataclass(slots=True)
class Segments:
    """Columns: segment i is [begin[i], end[i]) of `kind[i]`; `step` counts the steps that were done before it."""

    begin: Ints
    end: Ints
    kind: Ints
    step: Ints
    culprit: Ints
    """Of a peer wait: the rank that was waited for, else -1."""
    cause: Ints
    """Of a peer wait: the class that the culprit spent its time on; of LOST: the class it had; else -1."""

    def totals(self) -> dict[Class, int]:
        """Nanoseconds by class, for classes that occur."""
        sums = np.zeros(len(Class), np.int64)
        np.add.at(sums, self.kind, self.end - self.begin)
        return {each: int(sums[each]) for each in Class if sums[each]}

    def split(self, at: Ints) -> "Segments":
        """The same segments, cut at these times."""
        inner = np.unique(at)
        inner = inner[(inner > self.begin[0]) & (inner < self.end[-1])] if len(self.begin) else inner[:0]
        edges = np.union1d(np.append(self.begin, self.end[-1:]), inner)
        place = np.searchsorted(self.begin, edges[:-1], "right") - 1
        return Segments(
            edges[:-1], edges[1:], *(column[place] for column in (self.kind, self.step, self.culprit, self.cause))
        )

    def within(self, begin: int, end: int) -> NDArray[np.bool_]:
        """Which segments lie inside a range; cut them there first."""
        return (self.begin >= begin) & (self.end <= end)


@dataclass(slots=True)
class WaitSpans:
    """Columns: blocked intervals of a rank, with group number and number of the operation they wait for."""

    begin: Ints
    end: Ints
    group: Ints
    number: Ints


@dataclass(slots=True)
class Lane:
    """The training lane of one process."""

    segments: Segments
    waits: WaitSpans
    issues: dict[str, Ints]
    """Columns of collectives: time, group, number, bytes, name (number in `ProcessRecords.names`)."""
    marks: tuple[Ints, Ints]
    """When steps were done, and how many then were."""
    first: int
    """When the first step began; `end` of the process if there was none."""
    ran: Ints
    """CPU time of the thread at each mark, since it began; and below, how long it had waited for a core."""
    delayed: Ints
    detail: Ints
    """At each mark: collectives are recorded in every n-th step; 0: in all."""
    resumed: int
    """How many steps were done when this process began its first; `argosy.Run` marks what it took over before that."""


def training_lane(process: ProcessRecords) -> int:
    """The number of the thread that runs the steps: the one with most optimizer spans, else most forward spans."""
    columns = process.columns
    for names in (("step",), ("optimizer",), ("forward",), tuple(CLASS_OF)):
        mine = np.isin(columns["name"], process.ids(names))
        if mine.any():
            return int(np.bincount(columns["lane"][mine]).argmax())
    return 0


def read_lane(process: ProcessRecords, life: ProcessLife) -> Lane:
    """Classify the life of a process."""
    begin, end = life.begin, max(life.begin, life.end)
    columns = {
        name: column[process.columns["lane"] == training_lane(process)] for name, column in process.columns.items()
    }
    time = np.clip(columns["time"], begin, end)
    name, kind = columns["name"].astype(np.int64), columns["kind"]
    is_mark = np.isin(name, process.ids(["step"])) & (kind == SpanKind.POINT)
    marks = time[is_mark], columns["argument"][is_mark].astype(np.int64)
    is_issue = np.isin(name, process.ids(COLLECTIVES | ONE_WAY)) & (kind == SpanKind.POINT)
    issues = {"time": time[is_issue], "name": name[is_issue], **_unpack(columns["argument"][is_issue])}
    events = _with_tails(process, time, columns, is_issue)
    spans = _nested(process, events, end)
    joined = len(marks[0]) > 0 and marks[1][0] != 1  # Else the hooks count, from 1.
    late = time >= (marks[0][0] if joined else begin)
    first = _first_step(process, time[late], name[late], kind[late], end)
    resumed = int(marks[1][0]) - (0 if joined else 1) if len(marks[1]) else 0
    segments = _classify(spans, marks, first, life)
    ran, delayed, detail = (_counter(process, time, columns, each, marks[0]) for each in (STEP_CPU, STEP_DELAY, DETAIL))
    return Lane(segments, _waits(process, spans), issues, marks, first, ran, delayed, detail, resumed)


def _counter(process: ProcessRecords, time: Ints, columns: Any, name: str, at: Ints) -> Ints:
    """The value of a counter at these times; zeros if it was not recorded."""
    chosen = np.isin(columns["name"], process.ids([name])) & (columns["kind"] == SpanKind.COUNT)
    if not chosen.any():
        return np.zeros(len(at), np.int64)
    place = np.searchsorted(time[chosen], at, "right") - 1
    values = columns["argument"][chosen].astype(np.int64)
    return np.where(place >= 0, values[np.maximum(place, 0)], 0)


def _unpack(argument: NDArray[Any]) -> dict[str, Ints]:
    return {
        "group": (argument >> 56).astype(np.int64),
        "number": (argument >> 32 & 0xFFFFFF).astype(np.int64),
        "bytes": (argument & 0xFFFFFFFF).astype(np.int64),
    }


def _with_tails(
    process: ProcessRecords, time: Ints, columns: Any, is_issue: NDArray[np.bool_]
) -> dict[str, NDArray[Any]]:
    """The begins and ends, with a wait put in from the last collective of a backward pass to its end.

    DDP's reducer waits inside C++, where no hook sees it.
    """
    classified, kind = process.ids(CLASS_OF), columns["kind"]
    is_edge = np.isin(columns["name"], classified) & ((kind == SpanKind.BEGIN) | (kind == SpanKind.END))
    backward, wait = process.ids(["backward"]), process.ids(["wait"])
    events = {
        "time": time[is_edge],
        "name": columns["name"][is_edge].astype(np.int64),
        "begins": kind[is_edge] == SpanKind.BEGIN,
        "argument": columns["argument"][is_edge],
    }
    if not backward or not is_issue.any():
        return events
    wait_id = wait[0] if wait else len(process.names)
    at_issue = np.flatnonzero(is_issue & np.isin(columns["name"], process.ids(COLLECTIVES)))
    opens = np.flatnonzero(is_edge & np.isin(columns["name"], backward) & (kind == SpanKind.BEGIN))
    closes = np.flatnonzero(is_edge & np.isin(columns["name"], backward) & (kind == SpanKind.END))
    waits = np.flatnonzero(is_edge & (columns["name"] == wait_id))
    if not len(closes) or not len(opens) or not len(at_issue):
        return events
    newest = np.searchsorted(at_issue, closes) - 1
    opened = np.searchsorted(opens, closes) - 1
    last = at_issue[np.maximum(newest, 0)]
    inside = (newest >= 0) & (opened >= 0) & (last > opens[np.maximum(opened, 0)])
    seen = np.searchsorted(waits, closes) > np.searchsorted(waits, last)  # A wait that a hook saw.
    chosen = inside & ~seen
    place = np.searchsorted(np.flatnonzero(is_edge), last[chosen])  # Where the wait begins among the edges.
    until = np.searchsorted(np.flatnonzero(is_edge), closes[chosen])
    count = len(place)
    put = {
        "time": np.concatenate([time[last[chosen]], time[closes[chosen]]]),
        "name": np.full(2 * count, wait_id, np.int64),
        "begins": np.arange(2 * count) < count,
        "argument": np.concatenate([columns["argument"][last[chosen]]] * 2),
    }
    where = np.concatenate([place, until])
    return {key: np.insert(events[key], where, put[key]) for key in events}


def _nested(process: ProcessRecords, events: dict[str, NDArray[Any]], end: int) -> dict[str, NDArray[Any]]:
    """For each edge, what is innermost after it: class (-1: nothing); and each span's begin, end and argument."""
    classes = np.array([*(CLASS_OF.get(name, -1) for name in process.names), Class.COMM], np.int64)
    stack: list[int] = []
    time, name, begins = events["time"].tolist(), events["name"].tolist(), events["begins"].tolist()
    innermost, ends = np.full(len(time), -1, np.int64), np.full(len(time), end, np.int64)
    kinds = classes.tolist()
    for at, (moment, each, opens) in enumerate(zip(time, name, begins, strict=True)):
        if opens:
            stack.append(at)
        else:
            place = next((n for n in range(len(stack) - 1, -1, -1) if name[stack[n]] == each), None)
            if place is not None:  # What was opened inside it and never closed ends with it.
                for unclosed in stack[place:]:
                    ends[unclosed] = moment
                del stack[place:]
        innermost[at] = kinds[name[stack[-1]]] if stack else -1
    return {**events, "innermost": innermost, "until": ends, "kinds": classes}


def _first_step(process: ProcessRecords, time: Ints, name: Ints, kind: Any, end: int) -> int:
    begins = np.isin(name, process.ids(["data", "forward"])) & (kind == SpanKind.BEGIN)
    if not begins.any():
        begins = np.isin(name, process.ids(["backward", "optimizer", "evaluate"])) & (kind == SpanKind.BEGIN)
    return int(time[begins][0]) if begins.any() else end


def _classify(spans: dict[str, NDArray[Any]], marks: tuple[Ints, Ints], first: int, life: ProcessLife) -> Segments:
    begin, end = life.begin, max(life.begin, life.end)
    before = Class.RESTART if life.generation else Class.STARTUP
    time, kind = spans["time"], np.where(spans["innermost"] >= 0, spans["innermost"], Class.HOST)
    late = time >= first
    time, kind = time[late], kind[late]
    last = max(int(time[-1]), int(marks[0][-1]) if len(marks[0]) else 0) if len(time) else first
    if len(time) and (spans["innermost"][-1] >= 0 or not life.ok):  # It ended inside a span, or was killed.
        last = end
    edges = np.concatenate([[begin, first], time, [last, end]])
    kinds = np.concatenate([[before, Class.HOST], kind, [Class.IDLE]])
    edges = np.maximum.accumulate(np.clip(edges, begin, end))
    full = edges[1:] > edges[:-1]
    begins, ends, kinds = edges[:-1][full], edges[1:][full], kinds[full]
    steps = np.searchsorted(marks[0], begins, "right")
    done = np.concatenate([[0], marks[1]])[steps]
    nobody = np.full(len(begins), -1, np.int64)
    return Segments(begins, ends, kinds, done, nobody, nobody.copy()).split(marks[0])


def _waits(process: ProcessRecords, spans: dict[str, NDArray[Any]]) -> WaitSpans:
    wait = spans["begins"] & (spans["kinds"][spans["name"]] == Class.COMM)
    unpacked = _unpack(spans["argument"][wait])
    return WaitSpans(spans["time"][wait], spans["until"][wait], unpacked["group"], unpacked["number"])
