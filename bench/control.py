"""What the decisions about a run of 20,000 ranks on one host cost, without the processes.

    python bench/control.py [--quick] [--only ROW[:CONTENDER],...] [--repeat N] [--json PATH]

Each event goes through both machines, the run's and the host's, as an agent feeds it. `logged` adds the records of the
agent log, encoded and written to a file. Decisions wait for nothing, so all times are CPU time of this process.
"""

import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
from harness import Contender, Goal, Options, Row, run_benches

from argosy.control import (
    ChildEnded,
    ChildForked,
    Decided,
    EvidenceTaken,
    ForHost,
    ForRun,
    Launch,
    Launched,
    LogRecord,
    NodeEvent,
    NodeState,
    PageRead,
    Restart,
    StopWanted,
    StoreListens,
    Tick,
    node,
    recover,
)
from argosy.core import ProcessId, RankId, WaitStatus
from argosy.observe import Flag
from argosy.supervise.records.retrying_journal import RetryingJournal

RUN, NODE = "run", "node"
EVENTS = 2000
MANAGED = int(Flag.RUN_MANAGED)
KILLED, DONE = WaitStatus(signal=9), WaitStatus(code=0)


def launch_of(ranks: int, restart: Restart) -> Launch:
    return Launch(
        name=RUN,
        directory="/runs/run",
        argv=["train.py"],
        kind="program",
        target="train",
        args=[],
        python=["python"],
        dims={"rank": ranks},
        cwd="/",
        umask=0,
        preload=[],
        key="",
        restart=restart,
        grace_s=5.0,
        linger_s=600.0,
        detached=True,
    )


class Life:
    """One run on one node, with its log."""

    def __init__(self, ranks: int, restart: Restart) -> None:
        self.ranks, self.now = ranks, 1000.0
        self.state = NodeState(NODE)
        self.log: list[LogRecord] = []
        self._launch = launch_of(ranks, restart)

    def feed(self, event: NodeEvent) -> None:
        self.now += 1e-4
        self.log.append(Decided(event, self.now))
        node.react(self.state, event, self.now)

    def launched(self) -> "Life":
        hosts = [NODE] * self.ranks
        self.feed(Launched(run=RUN, number=1, launch=self._launch, hosts=hosts))
        self.feed(ForHost(StoreListens(RUN, 0, 29500)))
        return self

    def started(self) -> "Life":
        self.launched()
        for index in range(self.ranks):
            self.feed(self.forked(index))
        return self

    def generation(self, index: int) -> int:
        return self.state.runs[RUN].slots[index].generation

    def rank(self, index: int) -> RankId:
        return RankId("main", index, self.generation(index))

    def forked(self, index: int) -> NodeEvent:
        pid = 1000 + index + self.ranks * self.generation(index)
        return ForHost(ChildForked(RUN, self.rank(index), ProcessId(pid, pid)))

    def noted(self, index: int) -> NodeEvent:
        return ForHost(PageRead(RUN, self.rank(index), MANAGED, 2, True))

    def ended(self, index: int, status: WaitStatus) -> NodeEvent:
        return ForHost(ChildEnded(RUN, self.rank(index), status))


def microseconds(life: Life, events: list[Callable[[], NodeEvent]], log: RetryingJournal | None) -> list[float]:
    """What each event costs, made when its time comes."""
    found: list[float] = []
    for make in events:
        event, life.now = make(), life.now + 2.0
        begun = time.process_time()
        _, effects = node.react(life.state, event, life.now)
        if log is not None:
            log.append(msgspec.msgpack.encode([Decided(event, life.now)]))
            log.append(msgspec.msgpack.encode([node.Performed(effects[-1][0] if effects else 0)]))
        found.append((time.process_time() - begun) * 1e6)
    return found


def time_events(what: str, ranks: int, *, logged: bool = False) -> list[float]:
    """Microseconds for each of many events about single ranks."""
    life = Life(ranks, Restart(policy="rank", per_hour=10**9))
    chosen = [step * ranks // min(EVENTS, ranks) for step in range(min(EVENTS, ranks))]
    makers: dict[str, Callable[[int], NodeEvent]] = {
        "started": life.forked,
        "noted": life.noted,
        "exited": lambda index: life.ended(index, DONE),
        "lost": lambda index: life.ended(index, KILLED),
    }
    life.launched() if what == "started" else life.started()
    for index in range(ranks) if what == "lost" else ():
        life.feed(life.noted(index))
    with tempfile.TemporaryDirectory() as folder:
        log = RetryingJournal(Path(folder) / "log") if logged else None
        try:
            return microseconds(life, [partial(makers[what], index) for index in chosen], log)
        finally:
            if log is not None:
                log.close()


def time_whole(what: str, ranks: int) -> float:
    """Seconds of an event about all ranks."""
    life = Life(ranks, Restart.all())
    if what == "begin":
        return seconds(lambda: life.launched())
    life.started()
    if what == "stop":
        return seconds(lambda: life.feed(ForRun(RUN, StopWanted("you", signal.SIGTERM))))
    life.feed(life.ended(0, KILLED))
    for index in range(1, ranks):
        life.feed(life.noted(index))
    if what == "restart":
        return seconds(lambda: restart_all(life))
    payload = msgspec.msgpack.encode(life.log)
    return seconds(lambda: recover(NODE, msgspec.msgpack.decode(payload, type=list[LogRecord])))


def restart_all(life: Life) -> None:
    """From the evidence about the first failure until all ranks of the next generation were ordered."""
    life.feed(ForRun(RUN, EvidenceTaken(0)))
    for index in range(1, life.ranks):
        life.feed(life.ended(index, KILLED))
    life.now += 60.0
    life.feed(ForRun(RUN, Tick()))
    life.feed(ForHost(StoreListens(RUN, 1, 29501)))
    assert life.generation(life.ranks - 1) == 1


def seconds(work: Callable[[], object]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


def event_row(key: str, title: str, many: int) -> Row:
    small, large = f"{many // 200} ranks", f"{many} ranks"
    return Row(
        key=key,
        title=f"{title}, in a run of {many} ranks",
        contenders=[
            Contender(name=small, sample=partial(time_events, key, many // 200)),
            Contender(name=large, sample=partial(time_events, key, many)),
            Contender(name=f"{large}, logged", sample=partial(time_events, key, many, logged=True)),
        ],
        base=small,
        unit="us",
        goals=[Goal(of=large, at_most=30.0)],
        percentile=99,
    )


def whole_row(key: str, title: str, many: int) -> Row:
    few = many // 10
    return Row(
        key=key,
        title=title,
        contenders=[Contender(name=f"{n} ranks", sample=partial(time_whole, key, n)) for n in (few, many)],
        base=f"{few} ranks",
    )


def rows(options: Options) -> list[Row]:
    many = 2000 if options.quick else 20_000
    return [
        event_row("started", "a rank has started", many),
        event_row("noted", "a rank makes its first steps", many),
        event_row("exited", "a rank ends with exit code 0", many),
        event_row("lost", "a rank is killed, and its replacement ordered", many),
        whole_row("begin", "a launch, until all ranks are ordered", many),
        whole_row("stop", "a stop, until all ranks are told", many),
        whole_row("restart", "all ranks end and are ordered again: an event for each", many),
        whole_row("replay", "an agent log is read and replayed: two events for each rank", many),
    ]


if __name__ == "__main__":
    sys.exit(run_benches(__doc__ or "", rows))
