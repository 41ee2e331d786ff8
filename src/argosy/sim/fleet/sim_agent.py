"""A simulated host: an agent that runs the shipped machines on virtual time, and what outlives the agent.

The agent can be killed at any point: before a record is written, before an effect is performed, and after it is
performed but before that is remembered. Processes, zygotes and exit records outlive it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from argosy.control import (
    RETURN_S,
    AskKernel,
    ChildEnded,
    ChildForked,
    ChildRefused,
    ChildSilent,
    Decided,
    DeviceFault,
    EvidenceTaken,
    Finish,
    ForHost,
    ForkRanks,
    ForRun,
    HostEffect,
    HostEvent,
    HostTick,
    HostWakeAt,
    ImportIn,
    KillTree,
    Known,
    Letter,
    ListenFor,
    LocalRank,
    LogRecord,
    NodeEffect,
    NodeEvent,
    NodeState,
    Numbered,
    OfHost,
    OfRun,
    PageRead,
    Performed,
    Record,
    RemoveRun,
    RunRemoved,
    SendSignal,
    SpawnZygote,
    StoreEnded,
    StoreListens,
    TakeEvidence,
    Tick,
    TreeKilled,
    WakeAt,
    WardenCame,
    ZygoteCame,
    ZygoteLoaded,
    ZygoteLost,
    ZygoteSpawned,
    facts,
    node,
    recover,
    recovered,
)
from argosy.core import RankId, WaitStatus
from argosy.observe import Flag
from argosy.sim.fleet.sim_process import SimProcess, SimZygote, read_back
from argosy.sim.fleet.world import AgentKilled, World

DOWN_S = (0.01, 3.0)
"""How long a host has no agent after one was killed."""
STOPPED_S = 60.0
"""A process whose agent can be reached is gone this long after its signal, grace included."""


@dataclass(slots=True, kw_only=True)
class Outside:
    """What an agent does beyond its host."""

    send: Callable[[str, Letter], None]
    record: Callable[[facts.AnyFact], None]
    finish: Callable[[Finish], None]
    heard: Callable[[NodeEvent], None]
    """Looks at an event before an agent reacts."""
    before: Callable[[NodeState, NodeEffect], None]
    """Looks at an effect before it is performed."""
    came: Callable[[str], None]
    """A new agent connects to the others."""
    view: Callable[[], int | None]
    """The run's newest view; None once its head has forgotten the run."""


@dataclass(slots=True)
class SimAgent:
    """One host: an agent that may be down, and what outlives it."""

    world: World
    name: str
    outside: Outside
    spares: int = 0
    """Processes that wait to become a rank: forking one takes no time."""
    zygote_dies: float = 0.0
    managed: bool = True
    grouped: bool = False
    up: bool = True
    gone: bool = False
    """The host lost its power: nothing of it comes back."""
    hears: bool = True
    """Whether what other hosts send gets here."""
    heard: bool = True
    """Whether what it sends gets to other hosts."""
    reached_at: float = 0.0
    """Since when it does, if it once did not."""
    log: list[LogRecord] = field(default_factory=list[LogRecord])
    processes: list[SimProcess] = field(default_factory=list[SimProcess])
    executed: dict[RankId, SimProcess] = field(default_factory=dict[RankId, SimProcess])
    zygotes: list[SimZygote] = field(default_factory=list[SimZygote])
    life: int = 0
    wakes: dict[NodeEvent, float] = field(default_factory=dict[NodeEvent, float])
    state: NodeState = field(init=False)

    def __post_init__(self) -> None:
        self.state = NodeState(self.name)

    # --- the shell that is simulated

    def feed(self, event: NodeEvent) -> None:
        """Log, decide, perform: or be killed somewhere in between."""
        if not self.up:
            return
        try:
            self.world.point()
            self.world.note(self.name, event)
            if self.world.can_crash:
                self.log.append(Decided(event, self.world.now))
            self.outside.heard(event)
            self.state, effects = node.react(self.state, event, self.world.now)
            self._perform(effects)
            if self.world.happens(self.world.faults.log_shortened):
                self.log = read_back([Known(self.state)])
        except AgentKilled:
            self.die()

    def die(self) -> None:
        """The agent is killed; the warden starts another one."""
        self.up = False
        self.world.after(self.world.within(DOWN_S), self._restart)

    def lose_power(self) -> None:
        """The host ends with all that lives on it, and nobody reports that."""
        self.up, self.gone = False, True
        for process in [each for each in self.processes if each.status is None]:
            process.killed, process.status = True, WaitStatus()
        for zygote in self.zygotes:
            zygote.alive = False

    def _perform(self, effects: list[Numbered]) -> None:
        for number, effect in effects:
            self.world.point()
            self.outside.before(self.state, effect)
            self._do(effect)
            self.world.point()
            if self.world.can_crash:
                self.log.append(Performed(number))

    def _restart(self) -> None:
        """A new agent reads the log, performs what is pending, and learns what happened meanwhile."""
        if self.gone or self.up:
            return
        self.up, self.wakes, self.life = True, {}, self.life + 1
        self.outside.came(self.name)
        try:
            again, pending = recover(self.name, read_back(self.log))
            self.world.require(again == self.state, "W7", f"the log of {self.name} replays to another state")
            self.state = again
            self._perform(pending)
            for event in recovered(self.state):
                self.feed(event)
            for process in list(self.processes):
                if process.zygote is None:
                    self._tell_forked(process)
                self._tell_ended(process)
            for zygote in [each for each in self.zygotes if not each.alive]:
                self.feed(ForHost(ZygoteLost(zygote.key, zygote.id)))
            for zygote in [each for each in self.zygotes if each.alive]:
                if self.world.random.random() >= self.world.faults.zygote_late:
                    self._come_back(zygote)
                else:
                    self.world.after(self.world.within((0, 2 * RETURN_S)), partial(self._come_back, zygote))
            self.feed(ForHost(WardenCame()))
        except AgentKilled:
            self.die()

    def _come_back(self, zygote: SimZygote) -> None:
        """A zygote connects to a new agent and tells of its children before it is asked for more."""
        zygote.life = self.life
        for process in zygote.children.values() if zygote.alive else ():
            self._tell_forked(process)
            self._tell_ended(process)
        self._hear(zygote, ZygoteCame(zygote.key, zygote.id, zygote.ready))

    def _do(self, effect: NodeEffect) -> None:
        match effect:
            case Letter():
                self.outside.send(self.name, effect)
            case OfRun(_, Record(fact)):
                self.outside.record(fact)
            case OfRun(run, WakeAt(at)):
                self._wake_at(at, ForRun(run, Tick()))
            case OfRun(run, TakeEvidence(first)):
                taken = ForRun(run, EvidenceTaken(first))
                if self.world.random.random() >= self.world.faults.evidence_lost:
                    self.world.after(self.world.within((0, 3)), partial(self.feed, taken))
            case OfRun(_, Finish() as finish):
                self.outside.finish(finish)
            case OfHost(inner):
                self._do_on_host(inner)
            case _:
                raise AssertionError(effect)

    def _do_on_host(self, effect: HostEffect) -> None:
        world = self.world
        match effect:
            case HostWakeAt(at):
                self._wake_at(at, ForHost(HostTick()))
            case SpawnZygote(key):
                self._spawn_zygote(key)
            case ImportIn(process):
                for zygote in [each for each in self.zygotes if each.id == process and each.alive]:
                    world.after(world.within((0.2, 2)), partial(self._loaded, zygote))
            case ForkRanks(key, run, ranks, view=view):
                known = self.outside.view()
                world.require(known is None or 0 < view <= known, "W2", f"{ranks} start in view {view}")
                self._fork(key, run, ranks)
            case SendSignal(run, rank, number):
                for process in self.living(run, rank):
                    process.signals += 1
                    process.gone_by = world.now + STOPPED_S + world.faults.cut_s[1]
                    world.require(process.signals == 1, "W8", f"{rank} was signalled twice")
                    if not process.stubborn:
                        self.end_later(process, world.within((0, 8)), WaitStatus(signal=number))
            case KillTree(run, rank):
                for process in [each for each in self.living(run, rank) if self._is_known(each)]:
                    self.kill(process)
                self._sweep(run, rank)
            case AskKernel(run, rank):
                for process in [each for each in self.processes if each.rank == rank and each.status is not None]:
                    if self._is_watched(process):
                        self._feed_later(ChildEnded(run, rank, process.status or WaitStatus()))
            case ListenFor(run, generation):
                failed = world.happens(world.faults.store_refused)
                self._feed_later(StoreListens(run, generation, 0 if failed else 1000 + generation, "in use" * failed))
                if world.happens(world.faults.store_dies):
                    world.after(world.within((0, 60)), partial(self.feed, ForHost(StoreEnded(run, generation))))
            case RemoveRun(run):
                self._remove(run)
            case _:
                pass

    def _remove(self, run: str) -> None:
        """Leave nothing of a run: processes that still live were killed before."""
        alive = [each for each in self.processes if each.status is None]
        known = [each for each in alive if self._is_known(each) and not each.killed]
        self.world.require(not known, "W3", f"the run is removed while {known} live")
        for process in alive:
            process.killed = True
            self._end(process, WaitStatus(signal=9))
        self._feed_later(RunRemoved(run))

    def _wake_at(self, at: float, tick: NodeEvent) -> None:
        """Only the earliest wake-up of a machine counts: its tick asks for the next one."""
        if at < self.wakes.get(tick, 1e18):
            self.wakes[tick] = at
            self.world.at(at, partial(self._wake, at, tick))

    def _wake(self, at: float, tick: NodeEvent) -> None:
        if self.wakes.get(tick) == at:
            del self.wakes[tick]
            self.feed(tick)

    def _feed_later(self, event: HostEvent) -> None:
        """Answer this agent, not one that comes after it."""
        life = self.life
        self.world.after(0.001, lambda: self.feed(ForHost(event)) if self.life == life else None)

    # --- what lives on the host

    def _spawn_zygote(self, key: str) -> None:
        world = self.world
        zygote = SimZygote(key, world.new_process(), self.life)
        self.zygotes.append(zygote)
        self._feed_later(ZygoteSpawned(key, zygote.id))
        world.after(world.within((0.2, 2)), partial(self._hear, zygote, ZygoteCame(key, zygote.id, False)))
        if world.happens(self.zygote_dies):
            world.after(world.within((0.1, 40)), partial(self._kill_zygote, zygote))

    def _fork(self, key: str, run: str, ranks: tuple[RankId, ...]) -> None:
        """Start ranks."""
        world = self.world
        used = self.state.host.zygotes[key].process if key in self.state.host.zygotes else None
        zygote = next((each for each in self.zygotes if each.id == used and each.alive), None)
        if not self.up or (key and zygote is None):
            return  # Its loss is told.
        known = self.executed if zygote is None else zygote.children
        if zygote is not None and world.happens(self.zygote_dies):
            world.after(world.within((0, 1)), partial(self._kill_zygote, zygote))
        for rank in [rank for rank in ranks if self._is_asked(run, rank)]:
            if rank not in known and world.happens(world.faults.fork_refused):
                self._feed_later(ChildRefused(run, rank, "no memory"))
                continue
            if rank not in known:
                known[rank] = self._start(run, rank)
                known[rank].zygote = zygote
            forking_s = 0.01 if self.spares else world.within(world.faults.fork_s)
            self.spares = max(0, self.spares - 1)
            world.after(forking_s, partial(self._tell_forked, known[rank]))
            world.after(forking_s + 0.01, partial(self._tell_ended, known[rank]))

    def _start(self, run: str, rank: RankId) -> SimProcess:
        world, faults, rng = self.world, self.world.faults, self.world.random
        for other in self.processes:
            alive = other.status is None and not other.killed and other.rank.index == rank.index
            world.require(not alive, "W2", f"{other.rank} lives while {rank} starts")
        process = SimProcess(run, rank, world.new_process(), world.happens(faults.stubborn), self.managed)
        self.processes.append(process)
        world.after(world.within((0.5, 5)), partial(self._show_page, process))
        fate = rng.random()
        if fate < faults.ends:
            self.end_later(process, world.within((1, 90)), WaitStatus(code=0))
        elif fate < faults.ends + faults.fails:
            after_s = world.within((0, 30))
            self.end_later(process, after_s, rng.choice([WaitStatus(code=3), WaitStatus(signal=9)]))
        else:
            after_s = 500.0 if world.done_at is None else max(0.0, world.done_at - world.now)
            self.end_later(process, after_s, WaitStatus(code=0))
        return process

    def kill(self, process: SimProcess) -> None:
        """Nothing ignores this."""
        process.killed = True
        self.end_later(process, self.world.within((0, 2)), WaitStatus(signal=9))

    def _sweep(self, run: str, rank: RankId) -> None:
        """Search for a rank that nobody sees, and kill it. The search ends with the agent that makes it."""
        life = self.life

        def found() -> None:
            if self.life == life and self.up:
                for process in self.living(run, rank):
                    self.kill(process)
                self.feed(ForHost(TreeKilled(run, rank)))

        self.world.after(self.world.within((0, 0.1)), found)

    def _show_page(self, process: SimProcess) -> None:
        if process.status is None and self._is_known(process):
            flags = Flag.RUN_MANAGED if process.managed else Flag.PROCESS_GROUP if self.grouped else Flag(0)
            self.feed(ForHost(PageRead(process.run, process.rank, int(flags), 5, True)))

    def end_later(self, process: SimProcess, after_s: float, status: WaitStatus) -> None:
        """A process ends after some time."""
        self.world.after(after_s, partial(self._end, process, status))

    def _end(self, process: SimProcess, status: WaitStatus) -> None:
        if process.status is None:
            process.status = status
            if (likely := self.world.faults.device_fails) and not status.ok and self.world.happens(likely):
                process.device = DeviceFault("Xid 79", gone=self.world.happens(0.3))
            in_time = self.world.now <= process.gone_by
            self.world.require(in_time, "W3", f"{process.rank} was to be gone at {process.gone_by:.0f} s")
            if self.world.happens(self.world.faults.exit_unseen) and self._is_watched(process):
                self.feed(ForHost(ChildSilent(process.run, process.rank)))
            else:
                self._tell_ended(process)

    def _kill_zygote(self, zygote: SimZygote) -> None:
        zygote.alive = False
        self.feed(ForHost(ZygoteLost(zygote.key, zygote.id)))

    def _loaded(self, zygote: SimZygote) -> None:
        if zygote.alive:
            zygote.ready = True
            self._hear(zygote, ZygoteLoaded(zygote.key, zygote.id))

    def _hear(self, zygote: SimZygote, event: ZygoteCame | ZygoteLoaded) -> None:
        if zygote.alive:
            self.feed(ForHost(event))

    def _tell_forked(self, process: SimProcess) -> None:
        """Its parent says that it exists, unless that was killed before."""
        if process.zygote is None or process.zygote.alive:
            self.feed(ForHost(ChildForked(process.run, process.rank, process.id)))

    def _tell_ended(self, process: SimProcess) -> None:
        if process.status is not None and self._is_reported(process):
            self.feed(ForHost(ChildEnded(process.run, process.rank, process.status, device=process.device)))

    # --- what is known of it

    def living(self, run: str, rank: RankId) -> list[SimProcess]:
        """The processes of a rank that live."""
        return [p for p in self.processes if p.run == run and p.rank == rank and p.status is None]

    def _is_asked(self, run: str, rank: RankId) -> bool:
        """Whether the rank is still to be started."""
        local = self._local(run, rank)
        return local is not None and local.rank == rank and local.phase == "asked"

    def _is_known(self, process: SimProcess) -> bool:
        """Whether somebody sees a process: its parent, or the agent since it heard of it."""
        return process.zygote is None or process.zygote.alive or self._is_watched(process)

    def _is_reported(self, process: SimProcess) -> bool:
        """Whether the agent learns how a process ended: it watches it, or a parent that is connected says so."""
        zygote = process.zygote
        local = self._local(process.run, process.rank)
        other = local is not None and local.process not in (None, process.id)  # Its twin.
        return not other and (
            self._is_watched(process) or zygote is None or (zygote.alive and zygote.life == self.life)
        )

    def _is_watched(self, process: SimProcess) -> bool:
        """Whether the agent has heard of a process."""
        local = self._local(process.run, process.rank)
        return local is not None and local.process == process.id

    def _local(self, run: str, rank: RankId) -> LocalRank | None:
        known = self.state.host.runs.get(run)
        return None if known is None else known.ranks.get(rank.index)
