"""Make up what ranks recorded, for tests of the ledger: times are in milliseconds since the launch."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from argosy.control import LaunchEnded, LaunchStarted, RankExited, RankStarted
from argosy.core import RankId, WaitStatus
from argosy.insight.store import Group, LaunchData, ProcessLife, ProcessRecords
from argosy.observe import Journal, SpanKind, encode_frame, metrics_directory
from argosy.supervise import RunRecord

MS = 1_000_000
EPOCH = 1_700_000_000 * 1000 * MS


@dataclass
class Recording:
    """The records of one process, written like a diary."""

    rank: int
    generation: int = 0
    shift: float = 0.0
    """Added to all times: a clock that is wrong."""
    records: list[tuple[float, int, str, int, int]] = field(default_factory=list[tuple[float, int, str, int, int]])
    issued: int = 0
    done: int = 0

    def span(self, name: str, begin: float, end: float, lane: int = 0) -> "Recording":
        self.records += [(begin, SpanKind.BEGIN, name, 0, lane), (end, SpanKind.END, name, 0, lane)]
        return self

    def issue(self, at: float, op: str = "all_reduce", size: int = 1000) -> int:
        self.issued += 1
        argument = self.issued << 32 | size
        self.records.append((at, SpanKind.POINT, op, argument, 0))
        return argument

    def wait(self, begin: float, end: float, argument: int) -> "Recording":
        self.records += [(begin, SpanKind.BEGIN, "wait", argument, 0), (end, SpanKind.END, "wait", 0, 0)]
        return self

    def reduce(self, begin: float, end: float) -> "Recording":
        """A blocking all_reduce."""
        return self.wait(begin, end, self.issue(begin))

    def step(self, at: float, done: int | None = None) -> "Recording":
        self.done = self.done + 1 if done is None else done
        self.records.append((at, SpanKind.POINT, "step", self.done, 0))
        return self

    def process(self) -> ProcessRecords:
        records = sorted(self.records, key=lambda each: each[0])  # Stable: nested spans keep their order.
        names = list(dict.fromkeys(record[2] for record in records))
        columns = {
            "time": np.array([EPOCH + int((at + self.shift) * MS) for at, *_ in records], np.int64),
            "name": np.array([names.index(name) for _, _, name, _, _ in records], np.uint16),
            "kind": np.array([kind for _, kind, *_ in records], np.uint8),
            "lane": np.array([lane for *_, lane in records], np.uint16),
            "argument": np.array([argument for _, _, _, argument, _ in records], np.uint64),
            "step": np.zeros(len(records), np.uint32),
        }
        return ProcessRecords(self.rank, self.generation, names, columns)


def launch_of(recordings: list[Recording], end: float, lives: list[ProcessLife] | None = None) -> LaunchData:
    """A launch from 0 to `end` whose ranks lived all the time, unless `lives` says otherwise."""
    size = 1 + max(each.rank for each in recordings)
    launch = LaunchData(1, size, EPOCH, EPOCH + int(end * MS), ended=True)
    launch.lives = lives or [life(each.rank, 0, end) for each in recordings]
    launch.processes = {(each.rank, each.generation): each.process() for each in recordings}
    group = Group(0, "0", size, tuple(range(size)))
    launch.groups = {key: {0: group} for key in launch.processes}
    return launch


def life(rank: int, begin: float, end: float, generation: int = 0, ok: bool = True) -> ProcessLife:
    return ProcessLife(rank, generation, EPOCH + int(begin * MS), EPOCH + int(end * MS), ok)


def write_run(directory: Path, recordings: list[Recording], end: float, name: str = "made") -> Path:
    """A run's directory as agent and drain would have left it: one launch, all ranks from its beginning to its end."""
    size, began = 1 + max(each.rank for each in recordings), EPOCH / 1e9
    ended = began + end / 1e3
    metrics = metrics_directory(directory, 1)
    metrics.mkdir(parents=True)
    record = RunRecord(
        name=name,
        argv=["argosy", "run", "train.py"],
        cwd="/",
        size=size,
        host="here",
        launch=1,
        state="ended",
        code=0,
        started_at=began,
        ended_at=ended,
    )
    (directory / "run.json").write_bytes(msgspec.json.encode(record))
    facts: list[Any] = [LaunchStarted(at=began, launch=1, argv=record.argv, size=size, host="here")]
    facts += [RankStarted(at=began, rank=RankId("main", each.rank, 0), pid=1) for each in recordings]
    ok = WaitStatus(code=0)
    facts += [RankExited(at=ended, rank=RankId("main", each.rank, 0), pid=1, status=ok) for each in recordings]
    facts.append(LaunchEnded(at=ended, launch=1, code=0, reason=""))
    with Journal(directory / "events") as events:
        for fact in facts:
            events.append(msgspec.msgpack.encode(fact))
    with Journal(metrics / "spans") as spans:
        for each in recordings:
            made = each.process()
            about = {"rank": each.rank, "generation": 0, "next": 0, "lost": 0, "wall": 0, "monotonic": 0}
            about |= {"names": made.names, "first_name": 0}
            spans.append(encode_frame("spans", made.columns, about))
    for each in recordings:
        group = {"kind": "group", "at": began, "number": 0, "name": "0", "size": size, "span": [0, size, 1]}
        with Journal(metrics / f"{each.rank}.0.journal") as journal:
            journal.append(msgspec.msgpack.encode(group))
    return directory
