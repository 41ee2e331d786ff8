"""One run as its agent carries it: performs what the root decides, and feeds it what happens.

A shell: all decisions are in `root.py`. What it needs of the agent around it is the protocol `Host`.
"""

import contextlib
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Protocol

from argosy.core import ArgosyError, PeerLost, RankId, WaitStatus
from argosy.fabric import Assist, Link
from argosy.observe import Flag, Page, Progress
from argosy.process.evidence.inquest import Inquest
from argosy.process.evidence.oom import OomSample, OomSamples, again, explain_oom
from argosy.process.host.barrier import Barrier
from argosy.process.host.messages import (
    Child,
    ChildExited,
    Fork,
    ForkBeside,
    ForkStore,
    Happened,
    Message,
    Notice,
    RankInfo,
    RankSpec,
    RunInfo,
    Spawn,
    ToAgent,
)
from argosy.process.host.pool import Zygote, send
from argosy.process.host.proc import end_process, send_signal, start_ticks
from argosy.process.host.storeport import StorePort
from argosy.process.host.traces import Traces
from argosy.process.output.logfile import bound
from argosy.process.run import effects as do
from argosy.control import facts
from argosy.process.run import root
from argosy.control.launch import Launch, command, rank_defaults, rank_variables
from argosy.process.run.rundir import RunDir, new_record

FULL_BYTES = 64 << 10
"""With less than this a disk is full: a line that is written now may not fit."""
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
"""Signals that a process brings upon itself."""
STEADY_S = 10.0
"""A rank that lived this long counts as having made progress, even if it shows no steps."""


class Host(Protocol):
    """What a run needs of the agent around it."""

    runtime: Path
    memory: Path
    cgroup: Path | None

    def want_zygote(self, run: "Running") -> None: ...
    def spawn(self, message: Spawn, fds: list[int]) -> None: ...
    def wake_at(self, run: "Running", at: float) -> None: ...
    def log_event(self, run: "Running", event: root.Event, now: float) -> None: ...
    def log_child(self, run: "Running", child: Child) -> None: ...
    def log_port(self, run: "Running", port: int) -> None: ...
    def watch_child(self, child: Child) -> None: ...
    def child_settled(self, child: Child) -> None: ...
    def watch_listener(self, run: "Running", fd: int) -> None: ...
    def forget_listener(self, fd: int) -> None: ...
    def hold(self, name: str, fd: int) -> None: ...
    def drop(self, name: str) -> None: ...
    def release_spares(self, run: "Running") -> None: ...
    def finished(self, run: "Running", code: int) -> None: ...


class Running:
    """A run's processes, files and listeners."""

    def __init__(self, host: Host, run: str, number: int, launch: Launch, fds: list[int]) -> None:
        self.host, self.run, self.number, self.launch = host, run, number, launch
        self.sealed = fds[0]
        self.environment_lost = False
        """Agent and warden died together, and with them what a new process would need."""
        self.executed = False
        """The pool said that ranks must be executed, not forked."""
        self.stdin = fds[1] if len(fds) > 1 else None
        self.directory = RunDir(Path(launch.directory))
        self.record = new_record(launch, number, time.time())
        self.logs = Path(launch.logs) if launch.logs else self.directory.path / "logs" / str(number)
        self.state = root.new_run(number, launch.dims, launch.restart, launch.grace_s, launch.size)
        self.children: dict[RankId, Child] = {}
        self.started_at: dict[RankId, float] = {}
        self.pages: dict[RankId, Page] = {}
        self.oom: dict[RankId, list[OomSample]] = {}
        self.oom_samples = OomSamples()
        self.exits: dict[RankId, WaitStatus] = {}
        self.paused: dict[int, int] = {}
        self.watchers: list[Link[ToAgent]] = []
        self.lease: Link[ToAgent] | None = None
        self.lease_until: float | None = None
        self.zygote: Zygote | None = None
        self.store: StorePort | None = None
        self.store_child: Child | None = None
        self.spares: list[int] = []
        self.barrier = Barrier(launch.size)
        self.disk_full = False
        self.inquest = Inquest(self)
        self.files = host.runtime / "runs" / run
        self.memory = host.memory / run
        self.traces = Traces(run, self.memory, host.cgroup)

    def open(self) -> None:
        """Make the run's directories.

        Raises:
            OSError: there is no room, or no permission.
        """
        for path in (self.directory.path / "incidents", self.logs, self.files, self.memory):
            path.mkdir(parents=True, exist_ok=True)
        self.directory.write_record(self.record)

    def begin(self) -> None:
        """Start, as soon as what forks the ranks is ready."""
        self.tell_fact(
            facts.LaunchStarted(
                at=time.time(),
                launch=self.number,
                argv=self.launch.argv,
                size=self.launch.size,
                host=self.record.host,
            )
        )
        if self.launch.kind == "program":
            self.feed(root.Begin())
        else:
            self.host.want_zygote(self)

    def zygote_ready(self, zygote: Zygote | None) -> None:
        """The zygote can fork (None: ranks are executed)."""
        self.zygote, self.executed = zygote, zygote is None
        if self.state.began:
            self.start_waiting()
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
        return self.forks and waits and (self.zygote is None or self.zygote.link is None)

    def awaits(self, rank: RankId) -> bool:
        """Whether this rank was asked for and nobody has said yet that it exists."""
        return rank.index < len(self.state.slots) and (
            self.state.slots[rank.index].starting and self.state.rank(rank.index) == rank
        )

    def start_waiting(self) -> None:
        """Start the ranks that were asked for and never came: whoever was to start them is gone."""
        waiting = tuple(self.state.rank(slot.index) for slot in self.state.slots if slot.starting)
        for rank in waiting:  # P2: it may have come into being without anybody being told.
            self.traces.kill(rank, None)
        if waiting:
            self.start(waiting)

    # --- events in, effects out

    def feed(self, event: root.Event) -> None:
        """Let the root decide, remember the event, and perform what follows."""
        now = time.time()
        self.host.log_event(self, event, now)
        self.state, effects = root.react(self.state, event, now)
        for effect in effects:
            self.perform(effect)

    def perform(self, effect: do.Effect) -> None:
        """Do one thing that the root decided."""
        match effect:
            case do.OpenStore(generation):
                self.open_store(generation)
            case do.Start(ranks):
                self.start(ranks)
            case do.Signal(ranks, number):
                for rank in ranks:
                    if (child := self.children.get(rank)) is not None:
                        send_signal(child.born, number)
                        if rank.index in self.paused:  # A stopped process would keep it pending.
                            send_signal(child.born, 18)
            case do.Kill(ranks):
                for rank in ranks:
                    self.traces.kill(rank, self.children.get(rank))
            case do.TakeEvidence(first, cause):
                self.inquest.take(first, cause)
            case do.Record(fact):
                self.tell_fact(fact)
            case do.WakeAt(at):
                self.host.wake_at(self, at)
            case do.Finish(code, reason):
                self.finish(code, reason)

    def start(self, ranks: tuple[RankId, ...]) -> None:
        """Fork or execute ranks."""
        if self.environment_lost and self.state.final is None:
            self.feed(root.Broken("the run's environment was lost together with agent, warden and zygote"))
        if self.state.final is not None:  # They never come into being: else the run would wait for their end.
            for rank in ranks:
                self.feed(root.Exited(rank, WaitStatus(signal=15)))
            return
        specs = [self.spec(rank) for rank in ranks]
        with_stdin = self.stdin is not None and ranks[:1] == (RankId("main", 0, 0),)
        fds = [self.sealed, self.stdin] if with_stdin and self.stdin is not None else [self.sealed]
        if self.launch.kind == "program" or self.executed:
            for position, spec in enumerate(specs):
                first = position == 0 and with_stdin
                argv = command(self.launch, spec.rank.index)
                message = Spawn(self.run, spec, argv, self.launch.cwd, self.launch.umask, stdin=first)
                self.host.spawn(message, fds if first else [self.sealed])
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

    def assist(self, message: Assist, fds: list[int]) -> None:
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
        self.host.log_child(self, child)
        self.host.watch_child(child)
        if child.what == "store":
            self.store_child = child
            return
        self.children[child.rank] = child
        self.started_at[child.rank] = time.time()
        self.oom[child.rank] = [self.oom_samples.of(child.born.pid, time.monotonic())]
        self.inquest.started(child.rank)
        self.feed(root.Started(child.rank, child.born.pid))

    def exited(self, message: ChildExited) -> None:
        """A rank or a store is gone."""
        rank = message.child.rank
        self.host.child_settled(message.child)
        if message.child.what == "store":
            self.store_child = None
            return
        if rank in self.exits or rank.generation != self.state.slots[rank.index].generation:
            return
        self.exits[rank] = message.status
        asked = self.state.slots[rank.index].asked
        # Only a failure asks how far the others were: 256 pages read at each of 256 ends would be most of a launch.
        progress = {} if message.status.ok or asked else self.progress()
        lived_s = time.time() - self.started_at.get(rank, time.time())
        oom = ""
        before = self.oom.pop(rank, None)
        if before is not None and message.status.signal == signal.SIGKILL:
            oom = explain_oom(before, again(before[-1]), message.status, asked=asked)
        self.paused.pop(rank.index, None)
        self.inquest.exited(rank, message.status, oom)
        managed = any(p.has(Flag.RUN_MANAGED) for p in progress.values())
        # What others do that it was not started with, or that only wait for it, is no sign that it fares better.
        started_with = {each for each in progress if each.generation == rank.generation and not managed}
        movers = [seen for each, seen in progress.items() if each == rank or each in started_with]
        own = message.status.code is not None or message.status.signal in CRASHES
        own = own and not (rank in progress and progress[rank].has(Flag.ANEW))
        # One that ends itself after its first step, time and again, gets nowhere.
        steps_min = 2 if own and managed else 1
        self.feed(
            root.Exited(
                rank,
                message.status,
                progressed=(lived_s > STEADY_S and not managed) or any(_moved(p, steps_min) for p in movers),
                grouped=any(p.has(Flag.PROCESS_GROUP) for p in progress.values()),
                managed=managed,
                hopeless=any(p.has(Flag.HOPELESS) for p in progress.values()),
                own=own,
                oom=oom,
                cpu_s=message.cpu_s,
                max_rss_bytes=message.max_rss_bytes,
            )
        )

    def fork_failed(self, rank: RankId, reason: str) -> None:
        """A rank could not be started: as if it had ended with 127, with the reason in its log."""
        with (
            contextlib.suppress(OSError),
            open(self.error_log(rank), "a") as log,
        ):
            log.write(f"argosy: rank {rank.index} cannot start: {reason}\n")
        self.inquest.exited(rank, WaitStatus(code=127), "")
        self.feed(root.Exited(rank, WaitStatus(code=127)))

    def pause(self, rank: RankId, number: int) -> None:
        """A rank was stopped by a signal (0: goes on)."""
        if number:
            self.paused[rank.index] = number
        else:
            self.paused.pop(rank.index, None)
        self.tell_fact(facts.RankPaused(at=time.time(), rank=rank, signal=number, resumed=number == 0))

    def progress(self) -> dict[RankId, Progress]:
        """What the pages of the current generation say."""
        found: dict[RankId, Progress] = {}
        for slot in self.state.slots:
            rank = self.state.rank(slot.index)
            if rank not in self.pages:
                with contextlib.suppress(OSError, ValueError):
                    self.pages[rank] = Page.open(self.traces.page(rank))
            if rank in self.pages and (seen := self.pages[rank].read()) is not None:
                found[rank] = seen
        return found

    # --- the store

    def open_store(self, generation: int) -> None:
        """Have a port ready for the ranks of a generation; whoever served the last one ends."""
        self.close_store()
        self.barrier = Barrier(self.launch.size)
        for stale in [rank for rank in self.pages if rank.generation < generation]:
            self.pages.pop(stale).detach()
        try:
            self.store = StorePort(self.launch, generation)
        except OSError as error:
            self.feed(
                root.Broken(f"cannot listen on {self.launch.master_addr}:{self.launch.master_port}: {error.strerror}")
            )
            return
        self.host.log_port(self, self.store.port)
        if self.store.listener is not None:
            self.host.hold(f"store:{self.run}", self.store.listener.fileno())
            self.watch_store()

    def watch_store(self) -> None:
        """Wait for the first rank to connect."""
        if self.store is not None and self.store.listener is not None:
            self.host.watch_listener(self, self.store.listener.fileno())

    def serve_store(self) -> None:
        """The first rank has connected: let a process serve it."""
        if self.store is None or self.store.listener is None:
            return
        log = str(self.files / f"store-{self.store.generation}.out")
        message = ForkStore(self.run, self.store.generation, self.store.port, log)
        if self.zygote is not None:
            with contextlib.suppress(PeerLost):
                send(self.zygote, message, [self.store.listener.fileno()])
        self.host.forget_listener(self.store.listener.fileno())
        self.store.close()
        self.host.drop(f"store:{self.run}")

    def close_store(self) -> None:
        """End the store's process and port."""
        if self.store is not None:
            if self.store.listener is not None:
                self.host.forget_listener(self.store.listener.fileno())
            self.store.close()
            self.store = None
        self.host.drop(f"store:{self.run}")
        if self.store_child is not None:
            end_process(self.store_child.born)
            self.store_child = None

    # --- who listens

    def tell_fact(self, fact: facts.AnyFact) -> None:
        """Record a fact and tell the watchers."""
        self.directory.record(fact)
        self.tell(Happened(self.run, fact))

    def tell(self, message: Message) -> None:
        """Send to every watcher; who cannot take it is dropped by the agent later."""
        for link in list(self.watchers):
            with contextlib.suppress(ArgosyError):
                link.queue(message)  # The agent's loop flushes.

    def notice(self, text: str) -> None:
        """A line for the user."""
        self.tell(Notice(text))

    def info(self) -> RunInfo:
        """The run as `argosy ps` shows it."""
        steps = {rank.index: progress.reached or progress.steps for rank, progress in self.progress().items()}
        ranks = [
            RankInfo(slot.index, slot.generation, slot.pid, self.rank_state(slot), steps.get(slot.index, 0))
            for slot in self.state.slots
        ]
        return RunInfo(
            self.run,
            self.launch.name,
            self.launch.directory,
            root.describe(self.state),
            self.launch.size,
            self.record.started_at,
            self.launch.detached,
            ranks,
            self.launch.dims,
            [pid for pid in self.spares if start_ticks(pid) is not None],
        )

    def rank_state(self, slot: root.Slot) -> str:
        """One word or two."""
        if slot.starting:
            return "starting"
        if slot.pid:
            return "stopped" if slot.index in self.paused else "running"
        return str(slot.status) if slot.status is not None else "waiting"

    def upkeep(self) -> None:
        """Keep the logs bounded, and say when output is being lost."""
        for path in self.logs.glob("*.*.[oe][ur][tr]"):
            if trouble := bound(str(path), self.launch.log_bytes_max).trouble:
                self.notice(f"a log could not be bounded: {trouble}")
        now = time.monotonic()
        self.oom = {rank: self.oom_samples.again(samples, now) for rank, samples in self.oom.items()}
        self.check_disk()

    def check_disk(self) -> None:
        """Say once that output is being lost, or may be."""
        try:
            status = os.statvfs(self.logs)
        except OSError:
            return
        full = status.f_bavail * status.f_frsize < FULL_BYTES
        if full and not self.disk_full:
            rank = self.state.rank(0)
            self.tell_fact(
                facts.LogTrouble(at=time.time(), rank=rank, what=f"the disk is full, output is lost: {self.logs}")
            )
        self.disk_full = full

    # --- the end

    def finish(self, code: int, reason: str) -> None:
        """Leave nothing of the run but its directory."""
        self.host.release_spares(self)
        self.inquest.close()
        self.check_disk()
        self.traces.clear({rank: child.born.pid for rank, child in self.children.items()})
        self.close_store()
        for page in self.pages.values():
            page.detach()
        for path in (self.files, self.memory):
            shutil.rmtree(path, ignore_errors=True)
        self.record.state, self.record.code, self.record.reason = "ended", code, reason
        self.record.ended_at = time.time()
        self.directory.write_record(self.record)
        self.tell_fact(facts.LaunchEnded(at=time.time(), launch=self.number, code=code, reason=reason))
        self.directory.close()
        self.directory.release()
        for fd in (self.sealed, self.stdin):
            if fd is not None:
                os.close(fd)
        self.host.finished(self, code)


def _moved(progress: Progress, steps_min: int) -> bool:
    """Whether a rank did what it is there for."""
    if progress.has(Flag.RUN_MANAGED):
        return progress.steps >= steps_min
    return bool(progress.steps or progress.collectives or progress.has(Flag.SERVED))
