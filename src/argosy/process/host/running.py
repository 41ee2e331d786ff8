"""One run as its agent carries it: performs what the root decides, and feeds it what happens.

A shell: all decisions are in `root.py`.
"""

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from argosy.core import ArgosyError, PeerLost, RankId, WaitStatus
from argosy.fabric import ForkHelper, Link
from argosy.observe import DrainProcess, Flag, Page, RankProgress
from argosy.process.evidence.inquest import Inquest
from argosy.process.evidence.oom import OomSample, OomSamples, again, explain_oom
from argosy.process.host.agentlog import Has, Opened
from argosy.process.host.background_jobs import BackgroundJobs
from argosy.process.host.barrier import Barrier
from argosy.process.host.exit_event import exit_event
from argosy.process.host.log_upkeep import bound_logs, disk_is_full
from argosy.process.host.messages import (
    Child,
    ChildExited,
    Fork,
    ForkBeside,
    ForkStore,
    Happened,
    Message,
    Notice,
    RankSpec,
    Spawn,
    ToAgent,
)
from argosy.process.host.pool import Zygote, send
from argosy.process.host.proc import end_process, send_signal
from argosy.process.host.storeport import StorePort
from argosy.process.host.traces import Traces
from argosy.process.run import effects as do
from argosy.process.run import facts, root
from argosy.process.run.launch import Launch, command, rank_defaults, rank_variables
from argosy.process.run.rundir import RunDir, new_record

if TYPE_CHECKING:
    from argosy.process.host.agent import Agent


class Running:
    """A run's processes, files and listeners."""

    def __init__(self, host: "Agent", run: str, number: int, launch: Launch, fds: list[int]) -> None:
        self.host, self.run, self.number, self.launch = host, run, number, launch
        self.sealed = fds[0]
        self.environment_lost = False
        """Agent and warden died together, and with them what a new process would need."""
        self.executed = False
        """The pool said that ranks must be executed, not forked."""
        self.end_recorded = False
        """An earlier agent has recorded the end, and did not live to forget the run."""
        self.stdin = fds[1] if len(fds) > 1 else None
        self.directory = RunDir(Path(launch.directory))
        self.record = new_record(launch, number, time.time())
        self.logs = Path(launch.logs) if launch.logs else self.directory.path / "logs" / str(number)
        self.state = root.new_run(number, launch.dims, launch.restart, launch.grace_s, launch.size)
        self.children: dict[RankId, Child] = {}
        self.started_at: dict[RankId, float] = {}
        self.doubtful: Sequence[RankId] = ()
        """Ranks that an earlier agent may have started: whoever can tell is asked, then they are started."""
        self.pages: dict[RankId, Page] = {}
        self.oom: dict[RankId, list[OomSample]] = {}
        self.oom_samples = OomSamples()
        self.paused: dict[int, int] = {}
        self.watchers: list[Link[ToAgent]] = []
        self.lease: Link[ToAgent] | None = None
        self.lease_until: float | None = None
        self.zygote: Zygote | None = None
        self.store: StorePort | None = None
        self.store_child: Child | None = None
        self.spares: list[int] = []
        self.barrier = Barrier(launch.size)
        self.troubles: dict[str, str] = {}
        """What disks do not take, by its kind."""
        self.jobs = BackgroundJobs(host.wake)
        self.bounding = self.opening = self.starting_again = False
        """Jobs that are under way."""
        self.inquest = Inquest(self)
        self.files = host.runtime / "runs" / run
        self.memory = host.memory / run
        self.traces = Traces(run, self.memory, host.cgroup)
        self.drain = DrainProcess(self.memory, self.directory.path, number)

    def open(self) -> None:
        """Make the run's directories.

        Raises:
            OSError: there is no room, or no permission.
        """
        for path in (self.directory.path / "incidents", self.logs, self.files, self.memory):
            path.mkdir(parents=True, exist_ok=True)
        self.directory.write_record(self.record)

    @property
    def launched(self) -> facts.LaunchStarted:
        """The run's first fact."""
        launch, at = self.launch, self.record.started_at
        return facts.LaunchStarted(at=at, launch=self.number, argv=launch.argv, size=launch.size, host=self.record.host)

    def begin(self) -> None:
        """Start, as soon as what forks the ranks is ready."""
        self.tell_fact(self.launched)
        if self.launch.kind == "program":
            self.feed(root.Begin())
        else:
            self.host.want_zygote(self)

    def zygote_ready(self, zygote: Zygote | None) -> None:
        """The zygote can fork (None: ranks are executed)."""
        self.zygote, self.executed = zygote, zygote is None
        if zygote is None:  # Nobody can fork a store: rank 0 serves its own.
            self.launch = msgspec.structs.replace(self.launch, store=False)
            self.release_listener()
        if self.state.began:
            self.watch_store()
            self.start_waiting(self.waiting)
        else:
            self.feed(root.Begin())

    @property
    def forks(self) -> bool:
        """Whether ranks come from a zygote."""
        return self.launch.kind != "program" and not self.executed

    @property
    def needs_zygote(self) -> bool:
        """Whether ranks wait for a zygote to come up."""
        waits = not self.state.began or any(slot.starting for slot in self.state.slots)
        return self.forks and waits and not self.state.ended and (self.zygote is None or self.zygote.link is None)

    def awaits(self, rank: RankId) -> bool:
        """Whether this rank was asked for and nobody has said yet that it exists."""
        return self.state.slots[rank.index].starting and self.state.rank(rank.index) == rank

    @property
    def waiting(self) -> list[RankId]:
        """Those ranks."""
        return [self.state.rank(slot.index) for slot in self.state.slots if slot.starting]

    def start_waiting(self, ranks: Sequence[RankId]) -> None:
        """Start those of `ranks` that were asked for and never came: whoever was to start them is gone.

        One that came into being without anybody being told is killed first (P2).
        """
        waiting = [rank for rank in ranks if self.awaits(rank)]
        if not waiting or self.starting_again:
            return

        def swept(_: object) -> None:
            self.starting_again = False
            self.start([rank for rank in waiting if self.awaits(rank)])

        self.starting_again = True
        self.traces.kill(dict.fromkeys(waiting))
        self.jobs.do("killing ranks", partial(self.traces.sweep, waiting), swept)

    # --- events in, effects out

    def feed(self, event: root.Event, now: float | None = None) -> None:
        """Let the root decide, remember the event, and perform what follows."""
        now = time.time() if now is None else now
        self.host.log_event(self, event, now)
        self.state, effects = root.react(self.state, event, now)
        for effect in effects:
            self.perform(effect)

    def perform(self, effect: do.Effect) -> None:
        """Do one thing that the root decided."""
        match effect:
            case do.OpenStore(generation):
                self.open_store(generation)
            case do.Start(ranks, again=False):
                self.start(ranks)
            case do.Start(ranks):
                self.doubtful = ranks
            case do.Signal(ranks, number):
                for rank in ranks:
                    if (child := self.children.get(rank)) is not None:
                        send_signal(child.born, number)
                        if rank.index in self.paused:  # A stopped process would keep it pending.
                            send_signal(child.born, 18)
            case do.Kill(ranks):
                self.traces.kill({rank: self.children.get(rank) for rank in ranks})
                self.jobs.do("killing ranks", partial(self.traces.sweep, ranks), lambda _: None)
            case do.TakeEvidence(first, cause):
                self.inquest.take(first, cause)
            case do.Record(fact):
                self.tell_fact(fact)
            case do.WakeAt(at):
                self.host.wake_at(self, at)
            case do.Finish(code, reason):
                self.finish(code, reason)

    def start(self, ranks: Sequence[RankId]) -> None:
        """Fork or execute ranks."""
        if self.opening or not ranks:
            return
        if self.environment_lost and self.state.final is None:
            self.feed(root.Broken("the run's environment was lost together with agent, warden and zygote"))
        if self.state.final is not None:  # They never come into being: else the run would wait for their end.
            for rank in ranks:
                self.feed(root.Exited(rank, WaitStatus(signal=15)))
            return
        specs = [self.spec(rank) for rank in ranks]
        with_stdin = self.stdin is not None and [*ranks[:1]] == [RankId("main", 0, 0)]
        fds = [self.sealed, self.stdin] if with_stdin and self.stdin is not None else [self.sealed]
        if self.launch.kind == "program" or self.executed:
            for position, spec in enumerate(specs):
                first = position == 0 and with_stdin
                argv = command(self.launch, spec.rank.index)
                message = Spawn(self.run, spec, argv, self.launch.cwd, self.launch.umask, stdin=first)
                self.host.to_warden(message, fds if first else [self.sealed])
            return
        try:
            if self.zygote is None:
                raise PeerLost("the zygote", "it is gone")
            send(self.zygote, Fork(self.launch, self.run, specs, with_stdin), fds)
        except PeerLost:
            self.zygote = None
            self.host.want_zygote(self)

    def spec(self, rank: RankId) -> RankSpec:
        """What is particular to one rank."""
        stem = f"{rank.index}.{rank.generation}"
        port = self.store.port if self.store is not None else 0
        variables = rank_variables(self.launch, rank.index, rank.generation, port)
        variables["ARGOSY_RUN"] = self.run
        variables["ARGOSY_MEMORY"] = str(self.memory)
        variables["ARGOSY_AGENT"] = str(self.host.runtime / "agent.sock")
        if not self.launch.alone:
            variables["TORCHELASTIC_ERROR_FILE"] = str(self.logs / f"{stem}.error.json")
        return RankSpec(
            rank,
            variables,
            str(self.logs / f"{stem}.out"),
            str(self.error_log(rank)),
            defaults=rank_defaults(self.launch),
            page=self.traces.page(rank),
            stacks=str(self.files / f"{stem}.stacks"),
            cgroup=self.traces.prepare(rank),
        )

    def assist(self, message: ForkHelper, fds: list[int]) -> None:
        """Have the zygote fork a process beside a rank; without a zygote the rank sees its descriptors closed."""
        child = self.children.get(message.rank)
        if child is not None and self.zygote is not None:
            beside = ForkBeside(self.launch, message.entry, child.born.pid, self.traces.leaf(message.rank))
            with contextlib.suppress(PeerLost):
                send(self.zygote, beside, fds)

    def error_log(self, rank: RankId) -> Path:
        """Where the rank's stderr goes."""
        return self.logs / f"{rank.index}.{rank.generation}.{'out' if self.launch.one_file else 'err'}"

    # --- what the host's processes report

    def forked(self, child: Child) -> None:
        """A rank or a store exists."""
        self.host.log.append(Has(self.run, child))
        self.host.adoption.watch(child)
        if child.what == "store":
            if self.state.ended or self.store is None or self.store.generation != child.rank.generation:
                send_signal(child.born, 9)  # It came too late.
                return
            self.store_child = child
            self.release_listener()
            return
        now = time.time()
        self.watch_rank(child, now)
        self.feed(root.Started(child.rank, child.born.pid), now)

    def watch_rank(self, child: Child, started_at: float) -> None:
        """Know a rank's process, and look at it from now on."""
        self.children[child.rank] = child
        self.started_at[child.rank] = started_at
        self.oom[child.rank] = [self.oom_samples.of(child.born.pid, time.monotonic())]
        self.inquest.started(child.rank)

    def exited(self, message: ChildExited) -> None:
        """A rank or a store is gone."""
        rank, now = message.child.rank, time.time()
        self.host.adoption.settled(message.child)
        if message.child.what == "store":
            self.store_child = None
            return
        slot = self.state.slots[rank.index]
        known = self.children.get(rank, message.child)
        if rank.generation != slot.generation or not slot.alive or known.born != message.child.born:
            return
        # Only a failure asks how far the others were: 256 pages read at each of 256 ends would be most of a launch.
        progress = {} if message.status.ok or slot.asked else self.progress()
        lived_s = now - self.started_at.get(rank, now)
        oom = ""
        before = self.oom.pop(rank, None)
        if before is not None and message.status.signal == signal.SIGKILL:
            oom = explain_oom(before, again(before[-1]), message.status, asked=slot.asked)
        self.paused.pop(rank.index, None)
        self.inquest.exited(rank, message.status, oom, now)
        self.feed(exit_event(message, progress, lived_s, oom), now)

    def fork_failed(self, rank: RankId, reason: str) -> None:
        """A rank could not be started: as if it had ended with 127, with the reason in its log."""
        with contextlib.suppress(OSError), open(self.error_log(rank), "a") as log:
            log.write(f"argosy: rank {rank.index} cannot start: {reason}\n")
        now = time.time()
        self.inquest.exited(rank, WaitStatus(code=127), "", now)
        self.feed(root.Exited(rank, WaitStatus(code=127)), now)

    def pause(self, rank: RankId, number: int) -> None:
        """A rank was stopped by a signal (0: goes on)."""
        if number:
            self.paused[rank.index] = number
        else:
            self.paused.pop(rank.index, None)
        self.tell_fact(facts.RankPaused(at=time.time(), rank=rank, signal=number, resumed=number == 0))

    def progress(self) -> dict[RankId, RankProgress]:
        """What the pages of the current generation say."""
        found = {rank: self.progress_of(rank) for rank in map(self.state.rank, range(len(self.state.slots)))}
        return {rank: seen for rank, seen in found.items() if seen is not None}

    def progress_of(self, rank: RankId) -> RankProgress | None:
        """What the page of one rank says, if there is one."""
        if rank not in self.pages:
            with contextlib.suppress(OSError, ValueError):
                self.pages[rank] = Page.open(self.traces.page(rank))
        return self.pages[rank].read() if rank in self.pages else None

    # --- the store

    def open_store(self, generation: int) -> None:
        """Have a port ready for the ranks of a generation, if there is none; whoever served the last one ends."""
        if self.store is not None and self.store.generation == generation:
            return
        self.barrier = Barrier(self.launch.size)
        for stale in [rank for rank in self.pages if rank.generation < generation]:
            self.pages.pop(stale).detach()
        self.release_listener()
        child, self.store, self.store_child = self.store_child, None, None
        if child is None:
            self.listen(generation)
        else:  # The new store may need its port.
            self.opening = True
            self.jobs.do("ending the store", lambda: end_process(child.born), lambda _: self.listen(generation))

    def listen(self, generation: int) -> None:
        """Open the port, and start the ranks that wait for it."""
        waited, self.opening = self.opening, False
        try:
            self.store = StorePort(self.launch, generation)
        except OSError as error:
            where = f"{self.launch.master_addr}:{self.launch.master_port}"
            self.feed(root.Broken(f"cannot listen on {where}: {error.strerror}"))
        else:
            if self.store.listener is not None:  # Held first: a port that is in the log has a listener or a store.
                self.host.hold(f"store:{self.run}", self.store.listener.fileno())
            self.host.log.append(Opened(self.run, self.store.port, generation))
            self.watch_store()
        if waited:
            self.start(self.waiting)

    def watch_store(self) -> None:
        """Wait for the first rank to connect."""
        if self.store is not None and self.store.listener is not None and self.zygote is not None:
            self.host.watch_listener(self, self.store.listener.fileno())

    def serve_store(self) -> None:
        """The first rank has connected: let a process serve it."""
        if self.store is None or self.store.listener is None:
            return
        log = str(self.files / f"store-{self.store.generation}.out")
        message = ForkStore(self.run, self.store.generation, self.store.port, log)
        try:
            if self.zygote is None:
                raise PeerLost("the zygote", "it is gone")
            send(self.zygote, message, [self.store.listener.fileno()])
        except PeerLost:  # The next one serves it.
            self.host.forget_listener(self.store.listener.fileno())
            return
        self.release_listener()

    def release_listener(self) -> None:
        """The store has its own copy."""
        if self.store is not None and self.store.listener is not None:
            self.host.forget_listener(self.store.listener.fileno())
            self.store.close()
        self.host.drop(f"store:{self.run}")

    # --- who listens

    def tell_fact(self, fact: facts.AnyFact) -> None:
        """Record a fact and tell the watchers."""
        self.directory.record(fact)
        self.tell(Happened(self.run, fact))
        self.check_disks()

    def check_disks(self) -> None:
        """Say once what a disk does not take."""
        log, records = self.host.log.trouble, self.directory.trouble
        self.note_trouble(
            "log", log and f"the agent log cannot be written ({log}): an agent that is restarted now forgets this run"
        )
        self.note_trouble(
            "records", records and f"the run's records cannot be written ({records}): kept until there is room"
        )

    def note_trouble(self, kind: str, what: str) -> None:
        """Say `what` if it is new; "" if there is no trouble of this kind."""
        before, self.troubles[kind] = self.troubles.get(kind, ""), what
        if what and not before:
            self.tell_fact(facts.DiskTrouble(at=time.time(), what=what))

    def tell(self, message: Message) -> None:
        """Send to every watcher; who cannot take it is dropped by the agent later."""
        for link in list(self.watchers):
            with contextlib.suppress(ArgosyError):
                link.queue(message)  # The agent's loop flushes.

    def notice(self, text: str) -> None:
        """A line for the user."""
        self.tell(Notice(text))

    def upkeep(self) -> None:
        """Keep the logs bounded, say when output is being lost, and note that the run can be resumed."""
        self.directory.retry()
        self.drain.tend()
        seen = None if self.record.managed else self.progress_of(self.state.rank(0))
        if seen is not None and seen.has(Flag.RUN_MANAGED):
            self.record.managed = True
            self.directory.write_record(self.record)  # Now: a power cut would leave no time for it.
        self.check_disks()
        now = time.monotonic()
        self.oom = {rank: self.oom_samples.again(samples, now) for rank, samples in self.oom.items()}
        if not self.bounding:
            self.bounding = True
            work = partial(bound_logs, self.logs, self.launch.log_bytes_max)
            self.jobs.do("bounding logs", lambda: (work(), disk_is_full(self.logs)), self.bounded)

    def bounded(self, outcome: tuple[list[str], bool] | Exception) -> None:
        """Say what the logs' disk does not take."""
        self.bounding = False
        troubles, full = ([str(outcome)], False) if isinstance(outcome, Exception) else outcome
        for trouble in troubles:
            self.notice(f"a log could not be bounded: {trouble}")
        self.note_trouble("output", f"the disk is full, output is lost: {self.logs}" if full else "")

    # --- the end

    def finish(self, code: int, reason: str) -> None:
        """Leave nothing of the run but its directory."""
        self.host.pool.release(self.launch, self.run)
        self.inquest.close()
        if (seen := self.progress_of(self.state.rank(0))) is not None:
            self.record.managed, self.record.steps = seen.has(Flag.RUN_MANAGED), seen.reached or seen.steps
        self.release_listener()
        for page in self.pages.values():
            page.detach()
        self.pages.clear()
        work = partial(self.clear, dict(self.children))
        self.jobs.do("finishing", work, lambda outcome: self.finished(code, reason, outcome))

    def clear(self, children: Mapping[RankId, Child]) -> bool:
        """In the background: end whatever is left of the run; returns whether its disk is full."""
        self.traces.clear(children)
        if self.store_child is not None:
            end_process(self.store_child.born)
        self.drain.finish()
        for path in (self.files, self.memory):
            shutil.rmtree(path, ignore_errors=True)
        return disk_is_full(self.logs)

    def finished(self, code: int, reason: str, outcome: bool | Exception) -> None:
        """Nothing is left of the run: say so."""
        self.bounded(([str(outcome)], False) if isinstance(outcome, Exception) else ([], outcome))
        self.record.state, self.record.code, self.record.reason = "ended", code, reason
        self.record.ended_at = time.time()
        self.directory.write_record(self.record)
        self.check_disks()
        ended = facts.LaunchEnded(at=self.record.ended_at, launch=self.number, code=code, reason=reason)
        self.tell(Happened(self.run, ended)) if self.end_recorded else self.tell_fact(ended)
        self.directory.close()
        self.directory.release(self.run)
        for fd in (self.sealed, self.stdin):
            if fd is not None:
                os.close(fd)
        self.host.finished(self, code)
