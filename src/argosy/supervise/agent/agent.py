"""The agent: the daemon of a host that decides and talks. No user code runs in it.

One loop: links of clients, zygotes, ranks and the warden; the roots' wake-ups; the watch over the runs. It can be
killed at any moment: the warden starts it again, and it recalls its runs from the agent log.

A1  A client's link is the lease of its foreground run: when it ends, the run is stopped.
A2  Bytes that are no message end the link that they came from, and nothing else.
A3  Where nobody can reach it any more, because the runtime directory was removed, it stops its runs and ends.
"""

import contextlib
import heapq
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import setproctitle

from argosy.core import ArgosyError, ConfigError, PeerLost
from argosy.fabric import Arrive, ForkHelper, Link, accept, listen, peer_credentials, shared_memory_dir
from argosy.supervise.agent import root
from argosy.supervise.agent.adoption import Adoption
from argosy.supervise.agent.agent_log import AgentLog, Fed, Launched, Over
from argosy.supervise.agent.background_jobs import BackgroundJobs
from argosy.supervise.agent.pool import Pool
from argosy.supervise.agent.queries import StackRequest, answer_environment, answer_list
from argosy.supervise.agent.running import Running
from argosy.supervise.agent.warden_link import Attachment, find_warden
from argosy.supervise.cgroup import find_parent
from argosy.supervise.daemons import start_warden
from argosy.supervise.evidence.evidence_shell import FAST_S, SAMPLE_S
from argosy.supervise.lifeline import Lifeline
from argosy.supervise.messages import (
    ORPHAN,
    Attached,
    ChildExited,
    ChildPaused,
    Done,
    Drop,
    Forked,
    ForkFailed,
    FromWarden,
    GetEnvironment,
    Hold,
    LaunchRun,
    ListRuns,
    Quit,
    Refused,
    Retire,
    Shutdown,
    SignalRun,
    Spared,
    StopRun,
    TakeStacks,
    ToAgent,
    WatchRun,
    Welcome,
    ZygoteHello,
    ZygoteReady,
    to_agent,
)
from argosy.supervise.processes import send_signal
from argosy.supervise.records.exits import forget_exits
from argosy.supervise.records.owner import Owner
from argosy.supervise.records.rundir import RunDir, absent, free_directory, index_run, next_launch, run_id

UPKEEP_S = 2.0


class Agent:
    """The loop's state."""

    def __init__(self, runtime: Path) -> None:
        self.runtime = runtime
        self.memory = shared_memory_dir(runtime)
        self.cgroup = find_parent(runtime)
        self.selector = selectors.DefaultSelector()
        self.log = AgentLog(runtime)
        self.runs: dict[str, Running] = {}
        self.pool = Pool(runtime, self.to_warden)
        self.wakes: list[tuple[float, str]] = []
        self.stack_requests: list[StackRequest] = []
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Readable when a background job is over."""
        self.selector.register(self.wake_fd, selectors.EVENT_READ, lambda: os.eventfd_read(self.wake_fd))
        self.linger_s = 600.0
        self.idle_since = time.monotonic()
        self.upkeep_at = 0.0
        self.leaving = self.quitting = False
        self.links: set[Link[ToAgent] | Link[FromWarden]] = set()
        self.zygotes_alive: set[str] = set()
        """Keys of zygotes that an earlier agent started and that have not come back yet."""
        self.lifeline = Lifeline(runtime)
        self.warden: Link[FromWarden] | None = None
        self.unsent: list[tuple[object, list[int]]] = []
        """What waits for the next warden."""
        self.jobs = BackgroundJobs(self.wake)
        self.attached(find_warden(runtime))
        self.zygotes_alive.update(child.run for child in self.inherited if child.what == "zygote")
        self.adoption = Adoption(self)

    # --- the loop

    def loop(self) -> None:
        """Serve until told to quit, or until nothing was asked for as long as daemons linger."""
        self.adoption.begin()
        self.upkeep_at = time.monotonic() + UPKEEP_S  # Until then zygotes of an earlier agent have come back.
        listener = listen(self.runtime / "agent.sock")
        self.selector.register(listener, selectors.EVENT_READ, lambda: self.accept(listener))
        while not self.quitting:
            self.turn()
        self.selector.unregister(listener)
        self.to_warden(Quit(), [])
        while self.unsent:  # One that was killed meanwhile is replaced for it: who else would clean up?
            self.turn()
        time.sleep(0.05)  # The warden ends us; this only keeps the link open until it has read that.

    def turn(self) -> None:
        """Wait for something to happen, and deal with it."""
        for key, _ in self.selector.select(self.patience()):
            if self.selector.get_map().get(key.fd) is not None:  # An earlier one may have ended this one.
                key.data()
        self.tick()

    def patience(self) -> float:
        """Seconds until something must be looked at, if nobody calls."""
        if self.stack_requests or any(run.inquest.busy for run in self.runs.values()):
            return FAST_S
        patience = SAMPLE_S if self.runs else 1.0
        if any(link.wants_write for link in self.links):
            patience = FAST_S
        if self.wakes:
            patience = min(patience, max(0.0, self.wakes[0][0] - time.time()))
        return patience

    def tick(self) -> None:
        """Wake-ups, evidence under way, leases, upkeep, linger; then all that is to be said is sent."""
        if not self.leaving and not self.lifeline.in_place:  # A3
            self.shut_down(f"the removal of Argosy's runtime directory, {self.runtime}")
        self.jobs.collect()
        if self.warden is not None and self.warden.has_messages:
            self.serve_warden(self.warden)
        now = time.time()
        while self.wakes and self.wakes[0][0] <= now:
            _, run = heapq.heappop(self.wakes)
            if run in self.runs:
                self.runs[run].feed(root.Tick())
        self.stack_requests = [request for request in self.stack_requests if not request.step()]
        for running in list(self.runs.values()):
            running.jobs.collect()
            running.inquest.poll(time.monotonic())
            if running.lease_until is not None and time.monotonic() > running.lease_until:
                running.lease_until = None
                running.feed(root.StopWanted("the client is gone", signal.SIGTERM))
        self.adoption.tick()
        if time.monotonic() >= self.upkeep_at:
            self.upkeep_at = time.monotonic() + UPKEEP_S
            self.log.retry()
            for running in [run for run in self.runs.values() if not run.state.ended]:
                running.upkeep()
            self.mend()
            self.pool.trim({run.launch.key for run in self.runs.values()})
        if not self.runs and time.monotonic() - self.idle_since >= self.linger_s and not self.adoption.pending:
            self.quitting = True
        for link in [link for link in self.links if link.wants_write]:
            with contextlib.suppress(PeerLost):  # Its end is seen when it is read.
                link.flush()

    # --- links

    def accept(self, listener: socket.socket) -> None:
        """Take waiting connections."""
        while (sock := self.next_peer(listener)) is not None:
            link = Link(sock, to_agent, f"pid {peer_credentials(sock)[0]}")
            self.watch(link, lambda link=link: self.serve(link))

    def next_peer(self, listener: socket.socket) -> socket.socket | None:
        """Accept, or turn a peer away if there is no descriptor for it."""
        try:
            return accept(listener)
        except OSError as error:
            print(f"agent: turned a peer away: {error.strerror}", file=sys.stderr, flush=True)
            return None

    def watch(self, link: "Link[ToAgent] | Link[FromWarden]", on_ready: Callable[[], None]) -> None:
        self.selector.register(link, selectors.EVENT_READ, on_ready)
        self.links.add(link)

    def serve(self, link: Link[ToAgent]) -> None:
        """Handle what a peer sent; what goes wrong with one peer stays with it (A2)."""
        try:
            link.flush()
            for message, fds in link.receive():
                kept = self.handle(link, message, fds)
                for fd in fds:
                    if fd not in kept:
                        os.close(fd)
        except PeerLost:
            self.drop_link(link)
        except (ArgosyError, OSError) as error:
            print(f"agent: dropped {link.peer}: {error}", file=sys.stderr, flush=True)
            self.drop_link(link)

    def drop_link(self, link: Link[ToAgent]) -> None:
        """A peer is gone."""
        self.selector.unregister(link)
        link.close()
        self.links.discard(link)
        self.pool.lost(link)
        for request in [request for request in self.stack_requests if request.link is link]:
            request.close()
            self.stack_requests.remove(request)
        self.mend()
        for run in list(self.runs.values()):
            if link in run.watchers:
                run.watchers.remove(link)
            if run.lease is link:  # A1
                run.lease = None
                run.feed(root.StopWanted("the client is gone", signal.SIGTERM))

    def handle(self, link: Link[ToAgent], message: ToAgent, fds: list[int]) -> list[int]:
        """Do what a peer asks; returns the descriptors that are kept."""
        match message:
            case LaunchRun():
                return self.launch(link, message, fds)
            case Forked() | ForkFailed() | ChildExited() | ChildPaused():
                self.reported(message)
            case Spared(run, pids):
                if run in self.runs:
                    self.runs[run].spares = pids
            case ZygoteHello():
                self.adoption.environments(message.runs, fds)
                self.greet(link, message)
            case ZygoteReady():
                self.pool.preloaded(message)
            case Arrive(run, rank, count):
                if run in self.runs:
                    self.runs[run].barrier.arrive(rank.index, count, link)
            case ForkHelper(run):
                if run in self.runs:
                    self.runs[run].assist(message, fds)
            case ListRuns():
                link.send(answer_list(self.runs.values(), self.pool, self.warden_pid))
            case Shutdown(by):
                self.shut_down(by)
                link.send(Done())
            case _:
                self.handle_run(link, message)
        return []

    def handle_run(
        self, link: Link[ToAgent], message: WatchRun | StopRun | SignalRun | TakeStacks | GetEnvironment
    ) -> None:
        """What concerns one living run."""
        run = self.runs.get(message.run) or next(
            (run for run in self.runs.values() if run.launch.directory == message.run), None
        )
        if run is None:
            link.send(Refused("the run is not alive"))
            return
        match message:
            case WatchRun():
                self.join(link, run, message.lease)
            case StopRun():
                run.feed(root.StopWanted(message.by, message.signal, message.grace_s))
                link.send(Done())
            case SignalRun():
                for child in run.children.values():
                    send_signal(child.process, message.signal)
                link.send(Done())
            case TakeStacks():
                self.stack_requests.append(StackRequest(link, run, message))
            case GetEnvironment():
                answer_environment(link, run, message)

    # --- runs

    def launch(self, link: Link[ToAgent], message: LaunchRun, fds: list[int]) -> list[int]:
        """Accept a run, or say why not."""
        launch = msgspec.structs.replace(message.launch, key=self.pool.key_for(message.launch))
        if launch.fresh:
            free = free_directory(Path(launch.directory))
            launch = msgspec.structs.replace(launch, directory=str(free), name=free.name)
        directory = Path(launch.directory)
        number = next_launch(directory)
        run = run_id(directory, number)
        claimed = RunDir(directory)
        new = absent(directory / "incidents", Path(launch.logs or directory / "logs" / str(number)))
        try:
            if len(fds) != 1 + message.stdin:
                raise ConfigError(f"a launch comes with {1 + message.stdin} descriptors: {len(fds)}")
            claimed.claim(Owner(os.uname().nodename, str(self.runtime), run), list(self.runs))
            running = Running(self, run, number, launch, fds)
            running.open()
            self.hold(f"env:{run}", running.sealed)  # Before the run is remembered: no agent could do without it.
            if running.stdin is not None:
                self.hold(f"stdin:{run}", running.stdin)
        except (ConfigError, OSError) as error:
            if isinstance(error, OSError):
                claimed.release(run)
                for path in new:
                    with contextlib.suppress(OSError):
                        path.rmdir()
                where = f": {error.filename}" if error.filename else ""
                error = ConfigError(f"the run's directory cannot be used: {error.strerror}{where}")
            rivals = [each for each in self.runs.values() if each.launch.directory == launch.directory]
            ending = any(each.state.ended or each.environment_lost for each in rivals)
            link.send(Refused(str(error), error.hint, later=ending))
            return []
        index_run(directory, launch.name)
        self.linger_s = launch.linger_s
        self.log.append(Launched(run, number, launch, running.record.started_at))
        self.runs[run] = running
        self.join(link, running, lease=not launch.detached)
        running.begin()
        return fds

    def join(self, link: Link[ToAgent], run: Running, lease: bool) -> None:
        """Tell the link about the run from now on."""
        # Sent at the end of the turn: who is welcome finds this launch in the journal, not the one before.
        link.queue(Welcome(run.run, run.launch.directory, run.number, str(run.logs), run.launch.size))
        run.watchers.append(link)
        if lease:
            run.lease, run.lease_until = link, None

    def shut_down(self, by: str) -> None:
        """Stop all runs, then everything."""
        self.leaving, self.linger_s, self.idle_since = True, 0.0, -1e9
        for run in list(self.runs.values()):
            run.feed(root.StopWanted(by, signal.SIGTERM))

    def reported(self, message: Forked | ForkFailed | ChildExited | ChildPaused) -> None:
        """A zygote or the warden says what became of a child."""
        match message:
            case Forked(child):
                if child.what == "zygote":
                    self.pool.spawned(child)
                elif child.run in self.runs:
                    self.runs[child.run].forked(child)
                else:  # Its run is over.
                    send_signal(child.process, signal.SIGKILL)
            case ForkFailed(run, rank, reason):
                if rank.mesh == "zygote":
                    self.pool.failed(run, reason)
                elif run in self.runs:
                    self.runs[run].fork_failed(rank, reason)
            case ChildExited(child, status) if child.what == ORPHAN:
                if (known := self.adoption.whose(child.process)) is not None:
                    self.reported(ChildExited(known, status, message.max_rss_bytes, message.cpu_s))
            case ChildPaused(child, number) if child.what == ORPHAN:
                if (known := self.adoption.whose(child.process)) is not None:
                    self.reported(ChildPaused(known, number))
            case ChildExited(child):
                if child.what == "zygote":
                    self.zygotes_alive.discard(child.run)
                    self.pool.exited(child)
                    self.mend()
                elif child.run in self.runs:
                    self.runs[child.run].exited(message)
            case ChildPaused(child, number):
                if child.what == "rank" and child.run in self.runs:
                    self.runs[child.run].pause(child.rank, number)

    def greet(self, link: Link[ToAgent], hello: ZygoteHello) -> None:
        """A zygote connected, for the first time or after a restart of the agent."""
        self.zygotes_alive.discard(hello.key)
        self.adoption.learn(hello.children)
        runs = [run for run in self.runs.values() if run.forks and run.launch.key == hello.key]
        if runs:
            self.pool.expect(runs[0].launch, runs[0].sealed)
        if not self.pool.greeted(hello, link):
            link.send(Retire())
        for run in runs:
            if run.zygote is None and not self.pool.will_call(run.launch, run.zygote_ready):
                self.want_zygote(run)

    def mend(self) -> None:
        """See to it that a zygote comes for every rank that waits for one: theirs may have been killed."""
        for run in list(self.runs.values()):
            if run.needs_zygote and run.launch.key not in self.zygotes_alive:
                if run.zygote is not None and run.zygote.link is None:
                    run.zygote = None
                if run.zygote is None and not self.pool.will_call(run.launch, run.zygote_ready):
                    self.want_zygote(run)

    # --- what runs need of the host

    def want_zygote(self, run: Running) -> None:
        self.pool.want(run.launch, run.sealed, run.zygote_ready, run.notice)

    def wake_at(self, run: Running, at: float) -> None:
        heapq.heappush(self.wakes, (at, run.run))

    def wake(self) -> None:
        os.eventfd_write(self.wake_fd, 1)

    def log_event(self, run: Running, event: root.Event, now: float) -> None:
        if not isinstance(event, root.Tick) or run.state.turns:
            self.log.append(Fed(run.run, event, now))

    def watch_listener(self, run: Running, fd: int) -> None:
        if fd not in self.selector.get_map():
            self.selector.register(fd, selectors.EVENT_READ, run.serve_store)

    def forget_listener(self, fd: int) -> None:
        if fd in self.selector.get_map():
            self.selector.unregister(fd)

    def hold(self, name: str, fd: int) -> None:
        self.to_warden(Hold(name), [fd])

    def drop(self, name: str) -> None:
        self.to_warden(Drop(name), [])

    def finished(self, run: Running, code: int) -> None:
        """A run is over: forget it."""
        self.log.append(Over(run.run))
        for what in ("env", "stdin"):
            self.drop(f"{what}:{run.run}")
        self.runs.pop(run.run, None)
        if not self.runs:
            self.idle_since = max(self.idle_since, time.monotonic()) if self.linger_s else -1e9
            if self.lifeline.in_place:
                self.log.forget()
                forget_exits(self.runtime)

    # --- the warden

    def to_warden(self, message: object, fds: list[int]) -> None:
        """Send to the warden; if it was killed, to the next one."""
        if self.warden is not None:
            try:
                self.warden.send(message, fds)
                return
            except PeerLost:
                self.replace_warden(self.warden)
        self.unsent.append((message, [os.dup(fd) for fd in fds]))

    def attached(self, found: Attachment | Exception) -> None:
        """There is a warden; what it kept for us is for the adoption."""
        if isinstance(found, Exception):
            raise found
        self.warden, self.warden_pid, self.shelf, self.inherited = found.link, found.pid, found.shelf, found.children
        self.watch(found.link, lambda: self.serve_warden(found.link))

    def serve_warden(self, link: Link[FromWarden]) -> None:
        """Hear what the warden reports; if it is gone, start another."""
        try:
            link.flush()
            for message, _ in link.receive():
                if not isinstance(message, Attached):
                    self.reported(message)
        except ArgosyError:
            if link is self.warden:
                self.replace_warden(link)

    def replace_warden(self, killed: Link[FromWarden]) -> None:
        """The warden was killed: start another, which gets what we hold when it has come up."""
        self.selector.unregister(killed)
        self.links.discard(killed)
        killed.close()
        self.warden = None
        if self.lifeline.replaced:
            raise SystemExit(0)
        start_warden(self.runtime, os.getpid())
        self.jobs.do("finding the warden", lambda: find_warden(self.runtime), self.replaced_warden)

    def replaced_warden(self, found: Attachment | Exception) -> None:
        """Hand the next warden what we hold, and what was to be sent to the one before."""
        self.attached(found)
        for run in self.runs.values():
            self.hold(f"env:{run.run}", run.sealed)
            if run.stdin is not None:
                self.hold(f"stdin:{run.run}", run.stdin)
            if run.store is not None and run.store.listener is not None:
                self.hold(f"store:{run.run}", run.store.listener.fileno())
        unsent, self.unsent = self.unsent, []
        for message, fds in unsent:
            self.to_warden(message, fds)
            for fd in fds:
                os.close(fd)


def main() -> None:
    """Become the agent of the runtime directory in argv."""
    runtime = Path(sys.argv[1])
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    setproctitle.setproctitle(f"argosy: agent {runtime}")
    Agent(runtime).loop()
