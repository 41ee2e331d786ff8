"""The agent: the daemon of a host that decides and talks. No user code runs in it.

One loop: links of clients, zygotes, ranks and the warden; wake-ups; the watch over the runs. All decisions are in
`control`; the agent performs them and reports what happens. It can be killed at any moment: the warden starts it again,
and it recalls its runs from the agent log.

A1  A client's link is the lease of its foreground run: when it ends, the run is stopped.
A2  Bytes that are no message end the link that they came from, and nothing else.
A3  Where nobody can reach it any more, because the runtime directory was removed, it stops its runs and ends.
"""

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import setproctitle

from argosy.control import AcceptRun, ClearRun, ClientLeft, ForHost, Ordered, WardenCame, WardenLost
from argosy.core import ArgosyError, PeerLost
from argosy.fabric import (
    Arrive,
    BoardAdd,
    BoardGet,
    BoardSet,
    ForkHelper,
    Link,
    accept,
    listen,
    peer_credentials,
    shared_memory_dir,
)
from argosy.supervise.agent.client_requests import ClientRequests
from argosy.supervise.agent.decisions import Decisions
from argosy.supervise.agent.headed_run import HeadedRun
from argosy.supervise.agent.hosted_run import HostedRun, HostPlaces, RunEnvironment
from argosy.supervise.agent.performer import Performer
from argosy.supervise.agent.queries import answer_list
from argosy.supervise.agent.warden_link import WardenLink
from argosy.supervise.background_jobs import BackgroundJobs
from argosy.supervise.cgroup import find_parent
from argosy.supervise.environment import seal_content
from argosy.supervise.evidence.evidence_shell import FAST_S, SAMPLE_S
from argosy.supervise.lifeline import Lifeline
from argosy.supervise.messages import (
    ChildExited,
    ChildPaused,
    Done,
    Forked,
    ForkFailed,
    GiveHostsBack,
    HostEnded,
    LaunchRun,
    ListRuns,
    ProvideHosts,
    Quit,
    Shutdown,
    Spared,
    ToAgent,
    TunnelData,
    TunnelTook,
    ZygoteHello,
    ZygoteReady,
    to_agent,
)
from argosy.supervise.processes import send_signal
from argosy.supervise.records.exits import forget_exits

if TYPE_CHECKING:
    from argosy.supervise.agent.head_link import HeadLink
    from argosy.supervise.agent.run_hosts import RunHosts

UPKEEP_S = 2.0


class Agent:
    """The loop's state."""

    def __init__(self, runtime: Path) -> None:
        self._runtime = runtime
        self._selector = selectors.DefaultSelector()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Readable when a background job is over."""
        self._selector.register(self._wake_fd, selectors.EVENT_READ, lambda: os.eventfd_read(self._wake_fd))
        self._links: set[Link[ToAgent]] = set()
        self._lifeline = Lifeline(runtime)
        self._jobs = BackgroundJobs(self._wake)
        self._hosted: dict[str, HostedRun] = {}
        self._headed: dict[str, HeadedRun] = {}
        self._decisions = Decisions(runtime, lambda effect: self._performer.perform(effect))
        self._warden = WardenLink(runtime, self._selector, self._jobs)
        self._performer = Performer(self._decisions, self._hosted, self._headed, self._warden, self._selector)
        places = HostPlaces(runtime, shared_memory_dir(runtime), find_parent(runtime), self._wake)
        self._head: HeadLink | None = None
        if (runtime / "member.json").exists():
            places = self._serve_another(runtime, places)
        self._requests = ClientRequests(
            self._decisions, self._hosted, self._headed, places, self._warden, self._selector
        )
        self._upkeep_at = self._sample_at = 0.0
        self._recover(places)

    def _serve_another(self, runtime: Path, places: HostPlaces) -> HostPlaces:
        """Be a host of a run that another machine's agent heads."""
        from argosy.supervise.agent.head_link import HeadCalls, HeadLink  # TLS takes time to import.
        from argosy.supervise.agent.rank_reports import RankReports
        from argosy.supervise.agent.tunnels import Tunnels
        from argosy.supervise.records.membership import read_membership

        membership = read_membership(runtime)
        reports = RankReports(self._decisions, self._hosted, Tunnels(self._decisions, self._hosted, self._wake))
        head = self._head = HeadLink(membership, self._decisions, self._selector, reports, self._wake)
        self._performer.head = head
        address, interface = head.find_place()
        places = msgspec.structs.replace(places, name=head.name, address=address, interface=interface)
        head.calls = HeadCalls(
            accept=lambda run, order: self._accept_run(places, run, order),
            end_client=self._drop,
            pass_signal=self._pass_signal,
            dismiss=lambda by: self._requests.shut_down(by),
            abandon=self._clear_runs,
        )
        return places

    def _recover(self, places: HostPlaces) -> None:
        """Take over the runs of an earlier agent, and do what it did not live to do."""
        warden, performer = self._warden, self._performer
        headed, hosted_here = self._decisions.state.runs, self._decisions.state.host.runs
        for name, run in [*headed.items(), *((name, run) for name, run in hosted_here.items() if name not in headed)]:
            fds = [warden.shelf.pop(held) for held in (f"env:{name}", f"stdin:{name}") if held in warden.shelf]
            hosted = self._hosted[name] = HostedRun(name, run.number, run.launch, RunEnvironment(fds), places)
            if name in headed:
                self._headed[name] = HeadedRun(hosted, self._decisions)
                self._headed[name].recover()
                if run.launch.engine:
                    from argosy.supervise.agent.run_hosts import RunHosts

                    hosts = self._headed[name].hosts = RunHosts(hosted, self._decisions, self._selector, warden)
                    hosts.say = self._headed[name].notice
                    hosts.recover()
            for held, fd in zip(("env", "stdin"), fds, strict=False):
                warden.hold(f"{held}:{name}", fd)
        self._decisions.settle()
        self._decisions.recover()
        for name in list(self._hosted):
            performer.recover(name)
        for child in warden.inherited:
            performer.reported(Forked(child))
        for name in self._hosted:
            performer.compare_pauses(name)
        self._decisions.feed(ForHost(WardenCame()))
        warden.clear_shelf()
        warden.hear = performer.reported
        warden.lost = lambda: self._decisions.feed(ForHost(WardenLost()))
        warden.came = lambda: self._decisions.feed(ForHost(WardenCame()))
        self._decisions.settle()

    # --- the loop

    def loop(self) -> None:
        """Serve until told to quit, or until nothing was asked for as long as daemons linger."""
        listener = listen(self._runtime / "agent.sock")
        self._selector.register(listener, selectors.EVENT_READ, lambda: self._accept(listener))
        while not self._performer.quitting or self._headed:
            self._turn()
        self._selector.unregister(listener)
        while not self._warden.is_there:  # One that was killed meanwhile is replaced: who else would clean up?
            self._turn()
        self._warden.send(Quit(), [])
        time.sleep(0.05)  # The warden ends us; this only keeps the link open until it has read that.

    def _turn(self) -> None:
        """Wait for something to happen, and deal with it."""
        serve_ready(self._selector, self._patience())
        self._tick()

    def _patience(self) -> float:
        """Seconds until something must be looked at, if nobody calls."""
        writing = self._warden.wants_write or any(link.wants_write for link in self._links)
        writing = writing or any(hosts.wants_write for hosts in self._all_hosts())
        writing = writing or (self._head is not None and self._head.is_busy)
        if writing or self._requests.is_busy or any(run.evidence.busy for run in self._headed.values()):
            return FAST_S
        patience_s, wake_s = SAMPLE_S if self._hosted or self._head else 1.0, self._decisions.patience()
        return patience_s if wake_s is None else min(patience_s, wake_s)

    def _tick(self) -> None:
        """Wake-ups, work under way, upkeep; then all that was decided is performed, and all that is to be said sent."""
        if not self._lifeline.in_place and not self._performer.quitting:  # A3
            self._requests.directory_removed(self._runtime)
        self._jobs.collect()
        self._warden.turn()
        self._decisions.tick()
        self._requests.step()
        now = time.monotonic()
        for run in list(self._hosted.values()):
            run.kills.collect()
            run.jobs.collect()
        self._decisions.settle()
        self._forget_ended()
        if now >= self._sample_at:
            self._sample_at = now + SAMPLE_S
            for name in list(self._hosted):
                self._performer.ranks.read_pages(name)
        for run in list(self._headed.values()):
            run.note_managed()
            run.evidence.poll(now)
        if now >= self._upkeep_at:
            self._upkeep_at = now + UPKEEP_S
            self._upkeep()
        if self._head is not None:
            self._head.turn(now)
        for hosts in self._all_hosts():
            hosts.turn(now)
        self._decisions.settle()
        self._forget_ended()
        for link in [link for link in self._links if link.wants_write]:
            with contextlib.suppress(PeerLost):  # Its end is seen when it is read.
                link.flush()

    def _upkeep(self) -> None:
        self._decisions.log.retry()
        self._performer.ranks.sample_memory()
        for run in self._hosted.values():
            run.drain.tend()
        for run in [run for run in self._headed.values() if not run.state.ended]:
            run.disks.upkeep()

    def _forget_ended(self) -> None:
        """Let go of what belonged to runs that are over."""
        state = self._decisions.state
        for name in [name for name in self._hosted if name not in state.runs and name not in state.host.runs]:
            self._headed.pop(name, None)
            self._hosted.pop(name).environment.close()
            for held in ("env", "stdin"):
                self._warden.drop(f"{held}:{name}")
            if not self._hosted and self._lifeline.in_place:
                self._decisions.log.restart(self._decisions.state)
                forget_exits(self._runtime)

    def _all_hosts(self) -> "list[RunHosts]":
        """Those of runs that this agent heads."""
        return [run.hosts for run in self._headed.values() if run.hosts is not None]

    def _accept_run(self, places: HostPlaces, name: str, order: AcceptRun) -> None:
        """The head of a run wants ranks on this host."""
        if name in self._hosted or self._head is None:
            return
        fds = [seal_content(self._head.environment)]
        run = self._hosted[name] = HostedRun(name, order.number, order.launch, RunEnvironment(fds), places)
        self._warden.hold(f"env:{name}", fds[0])
        try:
            if not Path(order.launch.directory, "run.json").exists():
                raise FileNotFoundError(None, "it is not shared with this host", order.launch.directory)
            run.make_directories()
        except OSError as error:
            run.environment.unusable = (
                f"the run's directory cannot be used on {run.host}: {error.strerror}: {error.filename}"
            )

    def _clear_runs(self) -> None:
        """End everything of the runs on this host, as if their head had said so."""
        for name in self._hosted:
            self._decisions.feed(ForHost(Ordered(name, ClearRun())))

    def _pass_signal(self, number: int) -> None:
        """Send a signal to every rank on this host."""
        for run in self._decisions.state.host.runs.values():
            for process in [local.process for local in run.ranks.values() if local.process is not None]:
                send_signal(process, number)

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    # --- links

    def _accept(self, listener: socket.socket) -> None:
        """Take waiting connections."""
        while (sock := _next_peer(listener)) is not None:
            link = Link(sock, to_agent, f"pid {peer_credentials(sock)[0]}")
            self._selector.register(link, selectors.EVENT_READ, lambda link=link: self._serve(link))
            self._links.add(link)

    def _serve(self, link: Link[ToAgent]) -> None:
        """Handle what a peer sent; what goes wrong with one peer stays with it (A2)."""
        try:
            link.flush()
            for message, fds in link.receive():
                kept = self._handle(link, message, fds)
                for fd in fds:
                    if fd not in kept:
                        os.close(fd)
        except PeerLost:
            self._drop(link)
        except (ArgosyError, OSError) as error:
            print(f"agent: dropped {link.peer}: {error}", file=sys.stderr, flush=True)
            self._drop(link)

    def _drop(self, link: Link[ToAgent]) -> None:
        """A peer is gone."""
        self._selector.unregister(link)
        link.close()
        self._links.discard(link)
        self._requests.dropped(link)
        self._performer.zygotes.dropped(link)
        if self._head is not None:
            self._head.forget(link)
        for hosts in self._all_hosts():
            hosts.dropped(link)
        for hosted in self._hosted.values():
            hosted.meeting.board.forget(link)
        for run in self._headed.values():
            if run.watchers.remove(link):  # A1
                run.feed(ClientLeft())

    def _handle(self, link: Link[ToAgent], message: ToAgent, fds: list[int]) -> list[int]:
        """Do what a peer asks; returns the descriptors that are kept."""
        match message:
            case LaunchRun():
                return self._requests.launch(link, message, fds)
            case Forked() | ForkFailed() | ChildExited() | ChildPaused():
                self._performer.reported(message)
            case Spared(run, pids):
                if run in self._hosted:
                    self._hosted[run].spares = pids
            case ZygoteHello():
                self._performer.zygote_came(link, message, fds)
            case ZygoteReady():
                self._performer.zygotes.loaded(link, message)
            case Arrive() | BoardSet() | BoardAdd() | BoardGet() if self._head is not None:
                self._head.ask(link, message)
            case Arrive(run) | BoardSet(run) | BoardAdd(run) | BoardGet(run):
                if run in self._hosted and (headed := self._decisions.state.runs.get(run)) is not None:
                    self._hosted[run].meeting.handle(link, message, headed)
            case ForkHelper():
                self._performer.assist(message, fds)
            case ProvideHosts(run):
                if run in self._headed and (hosts := self._headed[run].hosts) is not None:
                    hosts.provide(link)
                else:
                    link.send(GiveHostsBack())
            case HostEnded(run, host, reason):
                if run in self._headed and (hosts := self._headed[run].hosts) is not None:
                    hosts.ended(host, reason)
            case TunnelData() | TunnelTook():
                for hosts in self._all_hosts():
                    hosts.ranks.tunnels.hear_client(link, message)
            case ListRuns():
                zygotes = self._decisions.state.host.zygotes.values()
                link.send(answer_list(self._headed.values(), self._hosted, zygotes, self._warden.pid))
            case Shutdown(by, lost):
                if self._head is not None:
                    self._head.engine_ends(lost=lost)
                self._requests.shut_down(by)
                link.queue(Done())
            case _:
                self._requests.about_run(link, message)
        return []


def serve_ready(selector: selectors.BaseSelector, patience_s: float) -> None:
    """Wait until something is ready, and call for each what it was registered with."""
    for key, _ in selector.select(patience_s):
        # An earlier call may have ended this one, and the number may be a new client's by now.
        if selector.get_map().get(key.fd) is key:
            key.data()


def _next_peer(listener: socket.socket) -> socket.socket | None:
    """Accept, or turn a peer away if there is no descriptor for it."""
    try:
        return accept(listener)
    except OSError as error:
        print(f"agent: turned a peer away: {error.strerror}", file=sys.stderr, flush=True)
        return None


def main() -> None:
    """Become the agent of the runtime directory in argv."""
    runtime = Path(sys.argv[1])
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    setproctitle.setproctitle(f"argosy: agent {runtime}")
    Agent(runtime).loop()
