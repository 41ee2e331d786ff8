"""The agent may be killed after any record of its log and after any effect: the run ends once, with its exit code."""

import heapq
import itertools
import random
from dataclasses import dataclass, field

import msgspec
from machines import Machine

from argosy.control.launch import Launch
from argosy.control.restart import Restart
from argosy.core import RankId
from argosy.supervise.agent import effects as do
from argosy.supervise.agent import root
from argosy.supervise.agent.agent_log import Launched, Remembered

POLICIES = [Restart.never(), Restart.all(3), Restart.rank(4), Restart(policy="all", max_restarts=2, startup_max=2)]


class Crash(BaseException):
    """kill -9 of the agent."""


@dataclass
class MortalMachine(Machine):
    """A machine whose agent is killed at some points: after an event was logged, or after an effect was performed.

    Processes, what was recorded, and the reports about processes outlive the agent; its wake-ups and the evidence that
    it is taking do not.
    """

    crash_at: frozenset[int] = frozenset()
    points: int = 0
    crashes: int = 0
    over: int = 0
    stores: list[int] = field(default_factory=list[int])
    begun: set[do.TakeEvidence] = field(default_factory=set[do.TakeEvidence])
    """Evidence that the agent that lives has begun to take."""

    def live(self) -> do.Finish:
        """Let the run live to its end, however often its agent is killed."""
        try:
            return self.run()
        except Crash:
            for _ in range(10_000):
                try:
                    self.recover()
                    return self.go_on()
                except Crash:
                    continue
        raise AssertionError(f"seed {self.seed}: the run does not end")

    def go_on(self) -> do.Finish:
        for _ in range(5000):
            if self.over:
                assert self.finished is not None
                return self.finished
            assert self._events, f"seed {self.seed}: nothing will ever happen, and the run has not ended"
            at, _, event = heapq.heappop(self._events)
            self.now = max(self.now, at)
            self.feed(event)
        raise AssertionError(f"seed {self.seed}: the run does not end")

    def recover(self) -> None:
        """What a new agent does: replay the log, record what is missing, and ask the root what is to be done."""
        self.crashes += 1
        self.begun.clear()
        mine = (root.Tick, root.EvidenceTaken)
        self._events = [entry for entry in self._events if not isinstance(entry[2], mine)]
        heapq.heapify(self._events)
        remembered = replay(self.log, self)
        self.state = remembered.state
        known = {msgspec.msgpack.encode(fact) for fact in self.told}
        self.told += [fact for fact in remembered.facts if msgspec.msgpack.encode(fact) not in known]
        if not self.state.began:  # The zygote is ready, or a program: the agent begins again.
            self.feed(root.Begin())
        self.feed(root.Recovered())

    def feed(self, event: root.Event) -> None:
        self.log.append((event, self.now))
        if isinstance(event, root.Exited):
            self.alive.pop(event.rank, None)
        self.maybe_crash()
        self.state, effects = root.react(self.state, event, self.now)
        self.state_is_sound()
        for effect in effects:
            if isinstance(event, root.Recovered) and isinstance(effect, do.Signal):
                assert not [process for process in self.those(effect.ranks) if process.told_at is not None]
            self.perform(effect)
            self.maybe_crash()
            self.over += isinstance(effect, do.Finish)

    def perform(self, effect: do.Effect) -> None:
        match effect:
            case do.Start(ranks, again=True):
                reported = {event.rank for *_, event in self._events if isinstance(event, root.Started | root.Exited)}
                for rank in ranks:
                    if rank not in self.alive and rank not in reported:
                        self.start(rank)
            case do.OpenStore(generation):
                if not self.stores or self.stores[-1] != generation:
                    self.stores.append(generation)
            case do.Finish():
                assert self.finished in (None, effect)
                assert not self.alive, f"seed {self.seed}: finished with {self.alive} alive"
                self.finished = effect
            case do.TakeEvidence():
                self.begun.add(effect)
                super().perform(effect)
            case _:
                super().perform(effect)

    def start(self, rank: RankId) -> None:
        assert self.stores[-1] == self.state.store, f"seed {self.seed}: {rank} starts without its store"
        super().start(rank)

    def maybe_crash(self) -> None:
        self.points += 1
        if self.points in self.crash_at:
            raise Crash


def replay(log: list[tuple[root.Event, float]], machine: Machine) -> Remembered:
    launch = Launch(
        name="one",
        directory="/",
        argv=[],
        kind="script",
        target="",
        args=[],
        python=[],
        dims={"rank": machine.size},
        cwd="/",
        umask=0,
        restart=machine.restart,
        grace_s=machine.grace_s,
    )
    remembered = Remembered(Launched("one", 1, launch, 0.0))
    for event, at in log:
        remembered.replay(msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=root.Event), at)
    assert not remembered.trouble
    return remembered


def first_cause(log: list[tuple[root.Event, float]]) -> int:
    """The exit code of a run that restarts nothing."""
    for event, _ in log:
        match event:
            case root.Exited(status=status) if not status.ok:
                return status.shell_code
            case root.StopWanted(signal=number):
                return 128 + number
            case root.Hung():
                return root.HANG_CODE
            case _:
                pass
    return 0


def check(machine: MortalMachine) -> None:
    """Live, and see that the end is right."""
    end = machine.live()
    assert machine.over == 1
    assert {*machine.state.owed} <= machine.begun
    # The deaths of the agent changed no decision: without them the same events lead to the same state.
    alike = [(root.Tick() if isinstance(event, root.Recovered) else event, at) for event, at in machine.log]
    undisturbed = replay(alike, machine)
    assert undisturbed.state == machine.state
    told = [msgspec.msgpack.encode(fact) for fact in machine.told]
    assert sorted(told) == sorted(msgspec.msgpack.encode(fact) for fact in undisturbed.facts)
    assert len(set(told)) == len(told), "a fact was recorded twice"
    if machine.restart.policy == "never" and not any(isinstance(event, root.Broken) for event, _ in machine.log):
        assert end.code == first_cause(machine.log)


def machine(seed: int, crash_at: frozenset[int]) -> MortalMachine:
    return MortalMachine(seed, size=1 + seed % 4, restart=POLICIES[seed % len(POLICIES)], crash_at=crash_at)


def test_an_agent_killed_once_at_any_point_of_a_life_changes_nothing():
    for seed in range(40):
        for point in itertools.count(1):
            mortal = machine(seed, frozenset({point}))
            check(mortal)
            if not mortal.crashes:
                break


def test_an_agent_killed_again_and_again_changes_nothing():
    for seed in range(300):
        points = random.Random(seed).sample(range(1, 120), 25)
        check(machine(seed, frozenset(points)))
