"""The other hosts of a run that this agent heads: their links, how long they have been silent, and who gives them.

A process of the room `hosts`, started through the warden, has the engine start one agent per host, says when one is
lost, and gives all of them back in the end.
"""

import itertools
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import msgspec

from argosy.control import (
    Acknowledged,
    Connected,
    ForRun,
    HostGone,
    HostSilence,
    Launch,
    Letter,
    Order,
    RunState,
    StopWanted,
    silence_of_returning,
)
from argosy.core import ArgosyError, RankId, host_label
from argosy.fabric import (
    HEAD,
    Link,
    RunAuthority,
    SecureLink,
    SecureListener,
    TlsAddress,
    create_authority,
    listen_secure,
)
from argosy.supervise.agent.decisions import Decisions
from argosy.supervise.agent.host_clock import WARN_S, ClockBounds, note_clock
from argosy.supervise.agent.host_messages import (
    BEAT_S,
    Beat,
    Dismissed,
    ForRank,
    HeadHello,
    HostEnds,
    HostHello,
    HostSays,
    HostTunnel,
    OrderPosted,
    PassSignal,
    RankAnswered,
    RankAsked,
    RankLeft,
    RanksSeen,
    ReportPosted,
    StacksTaken,
    ToHead,
    to_head,
)
from argosy.supervise.agent.hosted_run import HostedRun
from argosy.supervise.agent.remote_ranks import RemoteRanks
from argosy.supervise.agent.warden_link import WardenLink
from argosy.supervise.messages import GiveHostsBack, HostTickets, RankSpec, Spawn, ToAgent
from argosy.supervise.records.membership import HostNeeds, Membership

AUTHORITY = "authority.json"
GIVE_BACK_S = 30.0
NOTICE_S = 3.0
"""An engine that ends hosts usually tells `argosy run` as well: a second wish to stop would end the grace."""


@dataclass(slots=True)
class MemberHost:
    """One host, as the head sees it."""

    peer: str
    """Its name among the nodes that this agent knows: several runs may have hosts of one name."""
    silence: HostSilence = field(default_factory=HostSilence)
    link: SecureLink[ToHead] | None = None
    clock: ClockBounds = field(default_factory=ClockBounds)
    ends_at: float | None = None
    """When the run is stopped, because the engine has told the host to end."""
    clients: "dict[int, RemoteRank]" = field(default_factory=dict[int, "RemoteRank"])

    @property
    def is_there(self) -> bool:
        """Whether it would hear something that is said now."""
        return self.link is not None and self.silence.joined

    def send(self, message: object) -> None:
        """Say something, if there is a link; that it ended is seen when it is read."""
        if self.link is not None:
            with suppress(ArgosyError):
                self.link.send(message)


@dataclass(frozen=True, slots=True)
class RemoteRank:
    """A rank on another host that asked for something."""

    host: MemberHost = field(compare=False)
    client: int
    serial: int

    def send(self, message: ForRank) -> None:
        """Answer it.

        Raises:
            PeerLost: its host cannot be reached.
        """
        if self.host.link is not None:
            self.host.link.send(RankAnswered(self.client, message))


class RunHosts:
    """All of them."""

    def __init__(
        self, hosted: HostedRun, decisions: Decisions, selector: selectors.BaseSelector, warden: WardenLink
    ) -> None:
        self.name, self._hosted = hosted.name, hosted
        self._decisions, self._selector, self._warden = decisions, selector, warden
        self._hosts: dict[str, MemberHost] = {}
        self._authority: RunAuthority | None = None
        self._listener: SecureListener | None = None
        self._provider: Link[ToAgent] | None = None
        self._serials = itertools.count()
        self._turned_at = time.monotonic()
        self._beat_at = 0.0
        self._back: tuple[float, Callable[[], None]] | None = None
        self.say: Callable[[str], None] = lambda text: None
        self.ranks = RemoteRanks(self.name, self._hosts)

    @property
    def _state(self) -> RunState | None:
        return self._decisions.state.runs.get(self.name)

    # --- the beginning

    def open(self, names: list[str]) -> list[str]:
        """Open the port for the hosts, and have them started; returns their names among the nodes.

        Raises:
            ConfigError: `cryptography` is not installed.
            OSError: no port can be opened.
        """
        self._authority = create_authority(self.name)
        fd = os.open(self._hosted.files / AUTHORITY, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            file.write(msgspec.json.encode(self._authority))
        listener = listen_secure(TlsAddress("0.0.0.0", 0))
        self._warden.hold(f"hosts:{self.name}", listener.fileno())
        self._listen(listener)
        self._hosts.update((name, MemberHost(f"{name}@{self.name}")) for name in names)
        return [host.peer for host in self._hosts.values()]

    def recover(self) -> None:
        """Take over from an earlier agent: the hosts come back to the same port."""
        state, fd = self._state, self._warden.shelf.pop(f"hosts:{self.name}", None)
        known = () if state is None else (*state.hosts, *state.spares, *state.lost)
        for peer in [peer for peer in known if peer.endswith(f"@{self.name}")]:
            self._hosts[host_label(peer)] = MemberHost(peer, silence_of_returning())
        with suppress(OSError, msgspec.MsgspecError):
            self._authority = msgspec.json.decode((self._hosted.files / AUTHORITY).read_bytes(), type=RunAuthority)
        if fd is not None:
            self._warden.hold(f"hosts:{self.name}", fd)
            if self._authority is not None:
                self._listen(socket.socket(fileno=fd))

    def _listen(self, listener: socket.socket) -> None:
        assert self._authority is not None
        self._listener = SecureListener(listener, self._authority.issue(HEAD))
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    # --- the process that gives hosts

    def provide(self, link: Link[ToAgent]) -> None:
        """The process that gives hosts has connected: it gets what each of them needs to join."""
        self._provider = link
        if self._back is not None or self._authority is None or self._listener is None:
            link.send(GiveHostsBack())
            return
        tickets: dict[str, bytes] = {}
        for name in self._hosts:
            address = f"tls://0.0.0.0:{self._listener.port}"
            membership = Membership(self._authority.issue(name), address, needs_of(self._hosted.launch))
            tickets[name] = msgspec.json.encode(membership)
        link.send(HostTickets(self._hosted.launch.engine, tickets, self._listener.port))

    def ended(self, name: str, reason: str) -> None:
        """The engine says that a host is lost."""
        if name in self._hosts and self._back is None:
            host = self._hosts[name]
            self._decisions.feed(ForRun(self.name, HostGone(host.peer, reason, host.silence.joined)))

    def dropped(self, link: Link[ToAgent]) -> None:
        """A connection within this host ended; the process that gives hosts comes back, or is gone."""
        self.ranks.tunnels.client_left(link)
        if link is self._provider:
            self._provider = None

    def provider_ended(self) -> None:
        """The process that gives hosts is gone."""
        self._provider = None
        if self._back is not None:
            self._back = (0.0, self._back[1])
        else:
            self.say("the process that watches the hosts ended: a host that is lost is only seen to be silent")

    def give_back(self, then: Callable[[], None]) -> None:
        """The run is over: end everything on the hosts, then call `then`."""
        self._back = (time.monotonic() + GIVE_BACK_S, then)
        for host in self._hosts.values():
            host.send(Dismissed())
        if self._provider is not None:
            with suppress(ArgosyError):
                self._provider.send(GiveHostsBack())

    # --- links

    def _accept(self) -> None:
        if self._listener is None:
            return
        for sock, name in self._listener.accept():
            if (host := self._hosts.get(name)) is None:
                sock.close()
                continue
            self._drop(host)
            host.link = SecureLink(sock, to_head, name)
            self._selector.register(host.link, selectors.EVENT_READ, lambda host=host: self._serve(host))
            self._serve(host)

    def _serve(self, host: MemberHost) -> None:
        if host.link is None:
            return
        try:
            host.link.flush()
            for message in host.link.receive():
                host.silence.hear()
                self._hear(host, message)
        except ArgosyError as error:
            print(f"agent: host {host_label(host.peer)}: {error}", file=sys.stderr, flush=True)
            self._drop(host)

    def _drop(self, host: MemberHost) -> None:
        """The link of a host ended; its ranks ask again through the next one."""
        if (link := host.link) is None:
            return
        host.link = None
        self.ranks.tunnels.host_left(host)
        self._selector.unregister(link)
        link.close()
        for rank in host.clients.values():
            self._hosted.meeting.board.forget(rank)
        host.clients.clear()

    def _hear(self, host: MemberHost, message: ToHead) -> None:
        match message:
            case HostHello(unfit=unfit) if unfit:
                self.ended(host_label(host.peer), f"it is not used: {unfit}")
                host.send(Dismissed())
            case HostHello(taken):
                host.silence.join()
                mail = self._decisions.state.mail.get(host.peer)
                environment = self._hosted.environment.content
                host.send(HeadHello(0 if mail is None else mail.taken, environment))
                self._decisions.feed(Connected(host.peer, taken))
            case ReportPosted(number, run, report) if run == self.name:
                self._decisions.feed(Letter(host.peer, number, run, report))
            case Beat(taken, clock, high):
                host.clock.hear(clock, high, time.time())
                if host.clock.changed():
                    _note_clock(self._hosted, host, self.say)
                mail = self._decisions.state.mail.get(host.peer)
                if mail is not None and mail.waiting and mail.waiting[0].number <= taken:
                    self._decisions.feed(Acknowledged(host.peer, taken))
            case RankAsked(client, asked):
                if (state := self._state) is not None and asked.run == self.name:
                    rank = host.clients.setdefault(client, RemoteRank(host, client, next(self._serials)))
                    self._hosted.meeting.handle(rank, asked, state)
            case RankLeft(client):
                if (rank := host.clients.pop(client, None)) is not None:
                    self._hosted.meeting.board.forget(rank)
            case HostSays(text):
                self.say(f"{host_label(host.peer)}: {text}")
            case HostTunnel():
                self.ranks.tunnels.hear_host(message)
            case RanksSeen() | StacksTaken():
                self.ranks.hear(message)
            case HostEnds(lost=True):
                self.ended(host_label(host.peer), "its engine has given it up")
            case HostEnds():
                host.ends_at = time.monotonic() + NOTICE_S
            case _:
                pass

    def post(self, letter: Letter) -> None:
        """Send an order; one that finds no link waits in the mail."""
        host = self._hosts.get(host_label(letter.peer))
        if host is not None and host.silence.joined and isinstance(letter.content, Order):
            host.send(OrderPosted(letter.number, letter.run, letter.content))

    def pass_signal(self, number: int) -> None:
        """Send a signal to every rank on these hosts."""
        for host in self._hosts.values():
            host.send(PassSignal(number))

    # --- time

    @property
    def wants_write(self) -> bool:
        return any(host.link is not None and host.link.wants_write for host in self._hosts.values())

    def turn(self, now: float) -> None:
        """Flush, say that the head is there, and suspect who was silent for too long."""
        passed_s, self._turned_at = now - self._turned_at, now
        self._accept()
        beat = now >= self._beat_at
        self._beat_at = now + BEAT_S if beat else self._beat_at
        for host in self._hosts.values():
            if host.link is not None and host.silence.joined:
                mail = self._decisions.state.mail.get(host.peer)
                if beat:
                    host.send(Beat(0 if mail is None else mail.taken, time.time()))
                elif host.link.wants_write:
                    with suppress(ArgosyError):
                        host.link.flush()
            if host.ends_at is not None and now >= host.ends_at:
                host.ends_at = None
                if self._state is not None and not self._state.final:
                    by = f"the engine, which ends host {host_label(host.peer)}"
                    self._decisions.feed(ForRun(self.name, StopWanted(by, signal.SIGTERM)))
            self._wait(host, passed_s)
        left = self._provider is not None or any(host.link is not None for host in self._hosts.values())
        if self._back is not None and (now >= self._back[0] or not left):
            then = self._back[1]
            self.close()
            then()

    def _wait(self, host: MemberHost, passed_s: float) -> None:
        state = self._state
        if self._back is None and state is not None and host.peer not in state.lost:
            told = host.silence.wait(passed_s, host.peer)
            if told is not None:
                self._decisions.feed(ForRun(self.name, told))

    def close(self) -> None:
        """Let go of port and links."""
        self._back = None
        for host in self._hosts.values():
            self._drop(host)
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
        self._warden.drop(f"hosts:{self.name}")


def _note_clock(run: HostedRun, host: MemberHost, say: Callable[[str], None]) -> None:
    name, ahead_s = host_label(host.peer), host.clock.ahead_s
    run.jobs.do("noting a clock", partial(note_clock, run.launch.directory, name, ahead_s), lambda _: None)
    if abs(ahead_s) > WARN_S:
        say(f"{name}: its clock is {abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} the head's")


def needs_of(launch: Launch) -> HostNeeds:
    """What each host of a run must have."""
    return HostNeeds(launch.ranks_per_host, len(launch.devices), launch.directory, launch.check)


def start_provider(hosted: HostedRun, warden: WardenLink) -> None:
    """Have the engine of a run start its hosts."""
    launch, out = hosted.launch, str(hosted.files / "hosts.out")
    spec = RankSpec(RankId("hosts", 0), {"ARGOSY_RUNTIME_DIR": str(warden.runtime)}, out, out)
    argv = [sys.executable, "-m", "argosy.hosts", hosted.name]
    message = Spawn(hosted.name, spec, argv, launch.cwd, launch.umask, what="hosts")
    warden.send(message, [hosted.environment.sealed])
