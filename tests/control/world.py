"""A simulated world: agents that run the shipped machines on virtual time, with processes, zygotes and a bad network.

Everything comes from one seed. An agent can be killed at any point: before a record is written, before an effect is
performed, and after it is performed but before that is remembered. Processes, zygotes and exit records outlive it.
"""

import heapq
import itertools
import random
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from control.processes import RUN, AgentKilled, Process, SimZygote, a_launch, copied, lose_power

from argosy.control import facts, node
from argosy.control.host_events import (
    AskKernel,
    ChildEnded,
    ChildForked,
    ChildRefused,
    ChildSilent,
    ForkRanks,
    HostTick,
    HostWakeAt,
    ImportIn,
    KillTree,
    ListenFor,
    PageRead,
    RemoveRun,
    RunRemoved,
    SendSignal,
    SpawnZygote,
    StoreEnded,
    StoreListens,
    TreeKilled,
    WardenCame,
    ZygoteCame,
    ZygoteLoaded,
    ZygoteLost,
    ZygoteSpawned,
)
from argosy.control.host_state import LocalRank
from argosy.control.messages import SignalRanks
from argosy.control.node import ForHost, ForRun, Letter, NodeEffect, NodeEvent, OfHost, OfRun
from argosy.control.restart import Restart
from argosy.control.run_events import ClientCame, EvidenceTaken, Finish, Record, RunEvent, TakeEvidence, Tick, WakeAt
from argosy.control.run_state import RunState
from argosy.control.zygotes import RETURN_S
from argosy.core import ProcessId, RankId, WaitStatus
from argosy.observe import Flag


@dataclass
class Agent:
    """One host: an agent that may be down, and what outlives it."""

    world: "World"
    name: str
    up: bool = True
    gone: bool = False
    """The host lost its power: nothing of it comes back."""
    cut: bool = False
    """Nothing gets through between it and the other hosts."""
    log: list[node.LogRecord] = field(default_factory=list[node.LogRecord])
    processes: list[Process] = field(default_factory=list[Process])
    executed: dict[RankId, Process] = field(default_factory=dict[RankId, Process])
    zygotes: list[SimZygote] = field(default_factory=list[SimZygote])
    life: int = 0
    spares: int = 0
    """Processes that wait to become a rank: forking one takes no time."""
    wakes: dict[NodeEvent, float] = field(default_factory=dict[NodeEvent, float])

    def __post_init__(self) -> None:
        self.state = node.NodeState(self.name)

    # --- the shell that is simulated

    def feed(self, event: NodeEvent) -> None:
        """Log, decide, perform: or be killed somewhere in between."""
        if not self.up:
            return
        try:
            self.world.point(self)
            self.log.append(node.Decided(event, self.world.now))
            self.state, effects = node.react(self.state, event, self.world.now)
            self.perform(effects)
            if self.world.random.random() < 0.02:
                self.log = copied([node.Known(self.state)])
        except AgentKilled:
            self.up = False
            self.world.after(self.world.random.uniform(0.01, 3.0), self.restart)

    def perform(self, effects: list[node.Numbered]) -> None:
        for number, effect in effects:
            self.world.point(self)
            self.check_evidence(effect)
            self.do(effect)
            self.world.point(self)
            self.log.append(node.Performed(number))

    def check_evidence(self, effect: NodeEffect) -> None:
        """Nobody is told to stop because of a failure before that was looked into."""
        match effect:
            case Letter(run=run, content=SignalRanks(ranks)):
                self.world.check_evidence(self.state.runs[run], ranks)
            case OfHost(SendSignal(run, rank)) if run in self.state.runs:
                self.world.check_evidence(self.state.runs[run], (rank,))
            case _:
                pass

    def restart(self) -> None:
        """A new agent reads the log, performs what is pending, and learns what happened meanwhile."""
        if self.gone:
            return
        self.up, self.wakes, self.life = True, {}, self.life + 1
        try:
            again = node.recover(self.name, copied(self.log))
            assert again[0] == self.state, f"seed {self.world.seed}: the log replays to another state"
            self.state, pending = again
            self.perform(pending)
            for event in node.recovered(self.state):
                self.feed(event)
            for process in list(self.processes):
                if process.zygote is None:
                    self.tell_forked(process)
                self.tell_ended(process)
            for zygote in [each for each in self.zygotes if not each.alive]:
                self.feed(ForHost(ZygoteLost(zygote.key, zygote.id)))
            for zygote in [each for each in self.zygotes if each.alive]:
                if self.world.random.random() < 0.9:
                    self.come_back(zygote)
                else:
                    self.world.after(self.world.random.uniform(0, 2 * RETURN_S), partial(self.come_back, zygote))
            self.feed(ForHost(WardenCame()))
        except AgentKilled:
            self.up = False
            self.world.after(self.world.random.uniform(0.01, 3.0), self.restart)

    def come_back(self, zygote: SimZygote) -> None:
        """A zygote connects to a new agent and tells of its children before it is asked for more."""
        for process in zygote.children.values() if zygote.alive else ():
            self.tell_forked(process)
            self.tell_ended(process)
        self.hear(zygote, ZygoteCame(zygote.key, zygote.id, zygote.ready))

    def do(self, effect: NodeEffect) -> None:
        match effect:
            case Letter():
                self.world.send(self.name, effect)
            case OfRun(run, Record(fact)):
                self.world.record(run, fact)
            case OfRun(run, WakeAt(at)):
                self.wake_at(at, ForRun(run, Tick()))
            case OfRun(run, TakeEvidence(first, cause)):
                self.world.looked_into.add(cause)
                taken = ForRun(run, EvidenceTaken(first.index))
                if self.world.random.random() < 0.8:  # Else it never comes.
                    self.world.after(self.world.random.uniform(0, 3), lambda: self.feed(taken))
            case OfRun(run, Finish() as finish):
                self.world.finish(finish)
                self.world.after(0.0, lambda: self.feed(node.Forgotten(run)))
            case OfHost(inner):
                self.do_on_host(inner)
            case _:
                raise AssertionError(effect)

    def do_on_host(self, effect: Any) -> None:
        world, rng = self.world, self.world.random
        match effect:
            case HostWakeAt(at):
                self.wake_at(at, ForHost(HostTick()))
            case SpawnZygote(key):
                zygote = SimZygote(key, world.new_process())
                self.zygotes.append(zygote)
                self.feed_later(ZygoteSpawned(key, zygote.id))
                world.after(rng.uniform(0.2, 2), lambda: self.hear(zygote, ZygoteCame(key, zygote.id, False)))
                if rng.random() < world.zygote_deaths:
                    world.after(rng.uniform(0.1, 40), lambda: self.kill_zygote(zygote))
            case ImportIn(process):
                for zygote in [each for each in self.zygotes if each.id == process and each.alive]:
                    world.after(rng.uniform(0.2, 2), lambda zygote=zygote: self.loaded(zygote))
            case ForkRanks(key, run, ranks, view=view):
                known = world.head.state.runs.get(run)
                assert known is None or 0 < view <= known.view, f"seed {world.seed}: {ranks} start in view {view}"
                self.fork(key, run, ranks)
            case SendSignal(run, rank, number):
                for process in self.living(run, rank):
                    process.signals += 1
                    assert process.signals == 1, f"seed {world.seed}: {rank} was signalled twice"
                    if not process.stubborn:
                        self.end_later(process, rng.uniform(0, 8), WaitStatus(signal=number))
            case KillTree(run, rank):
                for process in [each for each in self.living(run, rank) if self.is_known(each)]:
                    self.kill(process)
                self.sweep(run, rank)
            case AskKernel(run, rank):
                for process in [each for each in self.processes if each.rank == rank and each.status is not None]:
                    if self.is_watched(process):
                        self.feed_later(ChildEnded(run, rank, process.status or WaitStatus()))
            case ListenFor(run, generation):
                failed = rng.random() < 0.02
                self.feed_later(StoreListens(run, generation, 0 if failed else 1000 + generation, "in use" * failed))
                if rng.random() < 0.2:
                    world.after(rng.uniform(0, 60), lambda: self.feed(ForHost(StoreEnded(run, generation))))
            case RemoveRun(run):
                alive = [each for each in self.processes if each.status is None and self.is_known(each)]
                alive = [each for each in alive if not each.killed]  # Those run no more; `RankFootprint.clear` waits.
                assert not alive, f"seed {world.seed}: removed while {alive} live"
                for process in [each for each in self.processes if each.status is None]:
                    process.killed = True
                    self.end(process, WaitStatus(signal=9))
                self.feed_later(RunRemoved(run))
            case _:
                pass

    def wake_at(self, at: float, tick: NodeEvent) -> None:
        """Only the earliest wake-up of a machine counts: its tick asks for the next one."""
        if at < self.wakes.get(tick, 1e18):
            self.wakes[tick] = at
            self.world.at(at, lambda: self.wake(at, tick))

    def wake(self, at: float, tick: NodeEvent) -> None:
        if self.wakes.get(tick) == at:
            del self.wakes[tick]
            self.feed(tick)

    # --- what lives on the host

    def kill(self, process: Process) -> None:
        process.killed = True
        self.end_later(process, self.world.random.uniform(0, 2), WaitStatus(signal=9))

    def sweep(self, run: str, rank: RankId) -> None:
        """Search for a rank that nobody sees, and kill it. The search ends with the agent that makes it."""
        life = self.life

        def found() -> None:
            if self.life == life and self.up:
                for process in self.living(run, rank):
                    self.kill(process)
                self.feed(ForHost(TreeKilled(run, rank)))

        self.world.after(self.world.random.uniform(0, 0.1), found)

    def fork(self, key: str, run: str, ranks: tuple[RankId, ...]) -> None:
        """Start ranks."""
        used = self.state.host.zygotes[key].process if key in self.state.host.zygotes else None
        zygote = next((each for each in self.zygotes if each.id == used and each.alive), None)
        if not self.up or (key and zygote is None):
            return  # Its loss is told.
        known = self.executed if zygote is None else zygote.children
        if zygote is not None and self.world.random.random() < self.world.zygote_deaths:
            self.world.after(self.world.random.uniform(0, 1), partial(self.kill_zygote, zygote))
        for rank in [rank for rank in ranks if self.is_asked(run, rank)]:
            if rank not in known and self.world.random.random() < 0.04:
                self.feed_later(ChildRefused(run, rank, "no memory"))
                continue
            if rank not in known:
                known[rank] = self.start(run, rank)
                known[rank].zygote = zygote
            forking_s = 0.01 if self.spares else self.world.random.uniform(0.01, 1.0)
            self.spares = max(0, self.spares - 1)
            self.world.after(forking_s, lambda process=known[rank]: self.tell_forked(process))
            self.world.after(forking_s + 0.01, lambda process=known[rank]: self.tell_ended(process))

    def is_asked(self, run: str, rank: RankId) -> bool:
        """Whether the rank is still to be started."""
        local = self.local(run, rank)
        return local is not None and local.rank == rank and local.phase == "asked"

    def is_known(self, process: Process) -> bool:
        """Whether somebody sees a process: its parent, or the agent since it heard of it."""
        return process.zygote is None or process.zygote.alive or self.is_watched(process)

    def is_watched(self, process: Process) -> bool:
        """Whether the agent has heard of a process."""
        local = self.local(process.run, process.rank)
        return local is not None and local.process == process.id

    def local(self, run: str, rank: RankId) -> LocalRank | None:
        known = self.state.host.runs.get(run)
        return None if known is None else known.ranks.get(rank.index)

    def start(self, run: str, rank: RankId) -> Process:
        world, rng = self.world, self.world.random
        for other in self.processes:
            alive = other.status is None and not other.killed and other.rank.index == rank.index
            assert not alive, f"seed {world.seed}: {other.rank} lives while {rank} starts"
        process = Process(run, rank, world.new_process(), rng.random() < 0.2, world.managed)
        self.processes.append(process)
        world.after(rng.uniform(0.5, 5), lambda: self.show_page(process))
        fate = rng.random()
        if fate < 0.5:
            self.end_later(process, rng.uniform(1, 90), WaitStatus(code=0))
        elif fate < 0.8:
            self.end_later(process, rng.uniform(0, 30), rng.choice([WaitStatus(code=3), WaitStatus(signal=9)]))
        else:
            self.end_later(process, 500.0, WaitStatus(code=0))
        return process

    def show_page(self, process: Process) -> None:
        if process.status is None and self.is_known(process):
            flags = Flag.RUN_MANAGED if process.managed else Flag.PROCESS_GROUP if self.world.grouped else Flag(0)
            self.feed(ForHost(PageRead(process.run, process.rank, int(flags), 5, True)))

    def end_later(self, process: Process, after_s: float, status: WaitStatus) -> None:
        self.world.after(after_s, lambda: self.end(process, status))

    def end(self, process: Process, status: WaitStatus) -> None:
        if process.status is None:
            process.status = status
            if self.world.random.random() < 0.1 and self.is_watched(process):  # No parent reports it.
                self.feed(ForHost(ChildSilent(process.run, process.rank)))
            else:
                self.tell_ended(process)

    def kill_zygote(self, zygote: SimZygote) -> None:
        zygote.alive = False
        self.feed(ForHost(ZygoteLost(zygote.key, zygote.id)))

    def loaded(self, zygote: SimZygote) -> None:
        if zygote.alive:
            zygote.ready = True
            self.hear(zygote, ZygoteLoaded(zygote.key, zygote.id))

    def hear(self, zygote: SimZygote, event: ZygoteCame | ZygoteLoaded) -> None:
        if zygote.alive:
            self.feed(ForHost(event))

    def tell_forked(self, process: Process) -> None:
        """Its parent says that it exists, unless that was killed before."""
        if process.zygote is None or process.zygote.alive:
            self.feed(ForHost(ChildForked(process.run, process.rank, process.id)))

    def tell_ended(self, process: Process) -> None:
        if process.status is not None and self.is_known(process):
            self.feed(ForHost(ChildEnded(process.run, process.rank, process.status)))

    def feed_later(self, event: Any) -> None:
        """Answer this agent, not one that comes after it."""
        life = self.life
        self.world.after(0.001, lambda: self.feed(ForHost(event)) if self.life == life else None)

    def living(self, run: str, rank: RankId) -> list[Process]:
        return [p for p in self.processes if p.run == run and p.rank == rank and p.status is None]


class World:
    """Virtual time, hosts and their network."""

    def __init__(
        self,
        seed: int,
        *,
        hosts: int,
        ranks: int,
        restart: Restart,
        crash_at: Container[int] = (),
        spare_hosts: int = 0,
    ) -> None:
        self.seed, self.restart, self.crash_at = seed, restart, crash_at
        self.looked_into: set[str] = set()
        """The causes that evidence was taken for."""
        self.random = random.Random(seed)
        self.now = 1000.0
        self.points = 0
        self.pids = 100
        self.viewed = (0, 0, 0)
        """What `check_view` depends on, when it looked last."""
        self.zygote_deaths = self.random.choice([0.0, 0.3])
        self.managed = self.random.random() < 0.3
        self.grouped = self.random.random() < 0.3
        self.told: list[facts.AnyFact] = []
        self.finished: list[Finish] = []
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.queued = 0
        names = [f"host{number}" for number in range(hosts + spare_hosts)]
        spares = self.random.choice([0, 0, 2])
        self.agents = {name: Agent(self, name, spares=spares) for name in names}
        self.hosts = list(self.agents.values())
        self.head = self.hosts[0]
        self.indices = range(ranks)
        self.placed = [names[index * hosts // ranks] for index in range(ranks)]
        executes = self.random.random() < 0.3
        launch = a_launch(
            dims={"pair": ranks // 2, "one": 2} if restart.along else {"rank": ranks},
            spares=spares,
            kind="program" if executes else "script",
            restart=restart,
            detached=self.random.random() < 0.5,
        )
        self.launched = node.Launched(run=RUN, number=1, launch=launch, hosts=self.placed, spares=names[hosts:])

    def run(self, stops: list[tuple[float, RunEvent]], events_max: int = 20_000) -> Finish:
        """Let the run live to its end."""
        self.after(0.0, lambda: self.begin())
        for at, event in stops:
            self.after(at, lambda event=event: self.head.feed(ForRun(RUN, event)))
        if len(self.agents) > 1:
            self.after(1.0, self.reconnect)
        for _ in range(events_max):
            there = [each for each in self.hosts if not each.gone]
            if self.finished and not any(RUN in (*each.state.runs, *each.state.host.runs) for each in there):
                return self.finished[0]
            assert self.queue, f"seed {self.seed}: nothing will ever happen, and the run has not ended"
            at, _, action = heapq.heappop(self.queue)
            self.now = max(self.now, at)
            action()
            self.check_view()
        raise AssertionError(f"seed {self.seed}: the run does not end")

    def begin(self) -> None:
        """The client launches; it tries again where the agent was killed before it took the launch down."""
        if not self.head.up:
            self.after(1.0, self.begin)
            return
        self.head.feed(self.launched)
        if not self.head.up:
            self.after(4.0, self.begin)
        else:
            self.client()

    def client(self) -> None:
        """The client that launched connects to each new agent."""
        if self.head.up and RUN in self.head.state.runs:
            if not self.head.state.runs[RUN].launch.detached and self.head.state.runs[RUN].lease_until is not None:
                self.head.feed(ForRun(RUN, ClientCame()))
            self.after(3.0, self.client)

    def point(self, agent: Agent) -> None:
        """A place where the agent may be killed."""
        self.points += 1
        if self.points in self.crash_at:
            raise AgentKilled

    def send(self, sender: str, letter: Letter) -> None:
        """Deliver a letter late, twice, or not at all."""
        if self.random.random() < 0.1 or self.agents[sender].cut or self.agents[letter.peer].cut:
            return
        for _ in range(self.random.choice([1, 1, 1, 2])):
            arrived = Letter(sender, letter.number, letter.run, letter.content)
            self.after(self.random.uniform(0, 0.5), partial(self.agents[letter.peer].feed, arrived))

    def reconnect(self) -> None:
        """Nodes tell each other now and then what they have taken; those who have more to say repeat it."""
        for one, other in itertools.permutations(self.agents.values(), 2):
            mail = one.state.mail.get(other.name)
            if mail is not None and mail.waiting and one.up and other.up and not one.cut and not other.cut:
                theirs = other.state.mail.get(one.name)
                one.feed(node.Connected(other.name, 0 if theirs is None else theirs.taken))
        self.after(1.0, self.reconnect)

    def record(self, run: str, fact: facts.AnyFact) -> None:
        if fact not in self.told:  # The journal takes a fact once.
            self.told.append(fact)

    def finish(self, finish: Finish) -> None:
        assert all(each == finish for each in self.finished), f"seed {self.seed}: two ends: {self.finished} {finish}"
        self.finished.append(finish)
        state = self.head.state.runs[RUN]
        for name in sorted({*state.lost, *state.spares, *state.clearing} - {self.head.name}):
            lose_power(self.agents[name])  # They are given back to their engine.

    def check_view(self) -> None:
        """Of the processes that live, at most one of a slot is in the current view."""
        state = self.head.state.runs.get(RUN)
        seen = (self.pids, 0, 0) if state is None else (self.pids, state.view, state.alive)
        if seen == self.viewed:  # Neither processes nor members came.
            return
        self.viewed = seen
        alive = [each for host in self.hosts for each in host.processes if each.status is None and not each.killed]
        members = [each.rank.index for each in alive if state is not None and state.is_member(each.rank)]
        assert len(members) == len(set(members)), f"seed {self.seed}: two members of a slot: {members}"

    def check_evidence(self, state: RunState, ranks: tuple[RankId, ...]) -> None:
        takedowns = {state.slots[rank.index].takedown for rank in ranks if rank == state.rank(rank.index)}
        causes = {state.takedowns[number].cause for number in takedowns if number in state.takedowns}
        unseen = {cause for cause in causes if cause.startswith("rank")} - self.looked_into
        assert not unseen, f"seed {self.seed}: {ranks} are stopped before evidence is taken: {unseen}"

    def new_process(self) -> ProcessId:
        self.pids += 1
        return ProcessId(self.pids, self.pids)

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self.at(self.now + seconds, action)

    def at(self, at: float, action: Callable[[], None]) -> None:
        self.queued += 1
        heapq.heappush(self.queue, (at, self.queued, action))
