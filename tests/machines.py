"""A simulated machine: performs the effects of a run's root on virtual time, with processes that misbehave."""

import heapq
import random
import signal
from dataclasses import dataclass, field

from argosy.control.facts import AnyFact, Restarting
from argosy.control.restart import Restart
from argosy.core import RankId, WaitStatus
from argosy.supervise.agent import effects as do
from argosy.supervise.agent import root


@dataclass
class Process:
    """One process of a slot."""

    rank: RankId
    pid: int
    stubborn: bool
    """Ignores every signal but SIGKILL."""
    told_at: float | None = None
    killed: bool = False


@dataclass
class Machine:
    """Virtual time, processes and evidence, all from one seed."""

    seed: int
    size: int
    restart: Restart
    grace_s: float = 5.0
    now: float = 1000.0
    state: root.RunState = field(init=False)
    log: list[tuple[root.Event, float]] = field(default_factory=list[tuple[root.Event, float]])
    alive: dict[RankId, Process] = field(default_factory=dict[RankId, Process])
    told: list[AnyFact] = field(default_factory=list[AnyFact])
    finished: do.Finish | None = None
    first_failure: WaitStatus | None = None
    evidence_wanted: int = 0
    evidence_taken: int = 0
    restarts: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.state = root.new_run(1, {"rank": self.size}, self.restart, self.grace_s, self.size)
        self._events: list[tuple[float, int, root.Event]] = []
        self._count = 0
        self._pid = 100

    def run(self, events_max: int = 5000) -> do.Finish:
        """Let the run live to its end."""
        self.at(0.0, root.Begin())
        if self.random.random() < 0.4:
            for _ in range(self.random.choice([1, 1, 2])):
                self.at(self.random.uniform(0, 60), root.StopWanted("somebody", signal.SIGTERM))
        if self.random.random() < 0.1:
            self.at(self.random.uniform(0, 60), root.Broken("no zygote"))
        if self.random.random() < 0.2:
            hung = self.random.randrange(self.size)
            self.at(self.random.uniform(5, 60), root.Hung(hung, "hung", grouped=self.random.random() < 0.5))
        for _ in range(events_max):
            if self.finished is not None:
                return self.finished
            assert self._events, f"seed {self.seed}: nothing will ever happen, and the run has not ended"
            at, _, event = heapq.heappop(self._events)
            self.now = max(self.now, at)
            self.feed(event)
        raise AssertionError(f"seed {self.seed}: the run does not end")

    def feed(self, event: root.Event) -> None:
        self.log.append((event, self.now))
        if isinstance(event, root.Exited):
            self.alive.pop(event.rank, None)
        before = self.state
        self.state, effects = root.react(before, event, self.now)
        self.state_is_sound()
        for effect in effects:
            self.perform(effect)

    def perform(self, effect: do.Effect) -> None:
        match effect:
            case do.Start(ranks):
                for rank in ranks:
                    self.start(rank)
            case do.Signal(ranks, number):
                for process in self.those(ranks):
                    self.tell(process, number)
            case do.Kill(ranks):
                for process in self.those(ranks):
                    self.kill(process)
            case do.TakeEvidence():
                self.evidence_wanted += 1
                if self.random.random() < 0.8:  # Else it never comes.
                    self.at(self.random.uniform(0, 3), root.EvidenceTaken())
            case do.Record(fact):
                self.told.append(fact)
                self.restarts += isinstance(fact, Restarting)
            case do.WakeAt(at):
                self.at(at - self.now, root.Tick())
            case do.Finish():
                assert self.finished is None, "finished twice"
                assert not self.alive, f"seed {self.seed}: finished with {self.alive} alive"
                self.finished = effect
            case do.OpenStore():
                pass

    def start(self, rank: RankId) -> None:
        for other in self.alive:
            assert other.index != rank.index, f"seed {self.seed}: P2: {other} lives while {rank} starts"
        if self.random.random() < 0.05:
            self.at(self.random.uniform(0, 1), root.Exited(rank, WaitStatus(code=127)))
            return
        self._pid += 1
        process = Process(rank, self._pid, stubborn=self.random.random() < 0.2)
        self.alive[rank] = process
        self.at(self.random.uniform(0, 1), root.Started(rank, process.pid))
        fate = self.random.random()
        if fate < 0.45:
            self.exit(process, self.random.uniform(1, 90), WaitStatus(code=0))
        elif fate < 0.75:
            status = self.random.choice([WaitStatus(code=3), WaitStatus(signal=9)])
            self.exit(process, self.random.uniform(1, 30), status)
        else:
            self.exit(process, 500.0, WaitStatus(code=0))

    def exit(self, process: Process, after_s: float, status: WaitStatus) -> None:
        progressed, grouped = self.random.random() < 0.5, self.random.random() < 0.3
        self.at(after_s, root.Exited(process.rank, status, progressed, grouped))

    def tell(self, process: Process, number: int) -> None:
        slot = self.state.slots[process.rank.index]
        assert slot.asked, "told to stop without being marked so"
        if process.told_at is None:
            process.told_at = self.now
            if not process.stubborn:
                self.exit(process, self.random.uniform(0, 2 * self.grace_s), WaitStatus(signal=number))

    def kill(self, process: Process) -> None:
        if not process.killed:
            process.killed = True
            self.exit(process, self.random.uniform(0, 3), WaitStatus(signal=9))

    def those(self, ranks: tuple[RankId, ...]) -> list[Process]:
        return [self.alive[rank] for rank in ranks if rank in self.alive]

    def at(self, after_s: float, event: root.Event) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + after_s, self._count, event))

    def state_is_sound(self) -> None:
        """What must hold after every event."""
        living = [slot for slot in self.state.slots if slot.pid]
        assert len({slot.pid for slot in living}) == len(living)
        assert sum(turn.final for turn in self.state.turns) <= 1
        chosen = [index for turn in self.state.turns for index in turn.ranks]
        assert len(chosen) == len(set(chosen)), f"seed {self.seed}: a rank is in two turns"
