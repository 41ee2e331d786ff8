"""A host's link to the head of the run that it serves: orders and answers in, reports and questions of ranks out.

If the head cannot be reached, ranks go on. The link comes back by itself, to the same head or to its next agent.
"""

import itertools
import selectors
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from argosy.control import ABANDONED_S, AcceptRun, Acknowledged, Connected, Letter, Report
from argosy.core import ArgosyError
from argosy.fabric import Link, SecureLink, connect_secure
from argosy.supervise.agent.decisions import Decisions
from argosy.supervise.agent.host_messages import (
    BEAT_S,
    Beat,
    Dismissed,
    FromRank,
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
    ReportPosted,
    TakeHostStacks,
    ToMember,
    to_member,
)
from argosy.supervise.agent.rank_reports import RankReports
from argosy.supervise.background_jobs import BackgroundJobs
from argosy.supervise.messages import ToAgent
from argosy.supervise.records.membership import Membership, own_address

HEAD_PEER = "head"
AGAIN_S = 0.3
DISMISSED_S = 20.0
"""How long a host without its head waits for it, once the engine has told it to end."""
_numbers = itertools.count(1)
"""Of the ranks that have asked something of a head."""


@dataclass(frozen=True, slots=True)
class HeadCalls:
    """What the agent does when the head says so."""

    accept: Callable[[str, AcceptRun], None] = lambda run, order: None
    end_client: Callable[[Link[ToAgent]], None] = lambda link: None
    """Ends the connection of a rank, which then asks again."""
    pass_signal: Callable[[int], None] = lambda number: None
    dismiss: Callable[[str], None] = lambda by: None
    """The host is not needed any more."""
    abandon: Callable[[], None] = lambda: None
    """Nobody will say what becomes of the ranks: end them."""


class HeadLink:
    """Keeps a host connected."""

    def __init__(
        self,
        membership: Membership,
        decisions: Decisions,
        selector: selectors.BaseSelector,
        reports: RankReports,
        wake: Callable[[], None],
    ) -> None:
        self._membership, self._decisions, self._selector, self.reports = membership, decisions, selector, reports
        self._jobs = BackgroundJobs(wake)
        self._link: SecureLink[ToMember] | None = None
        self._greeted = False
        self._clients: dict[Link[ToAgent], int] = {}
        self._again_at = self._beat_at = 0.0
        self._heard_at = time.monotonic()
        self.environment: bytes = b""
        """Of the run, sealed; empty until the head has sent it."""
        self.calls = HeadCalls()
        self.dismissed = False

    def find_place(self) -> tuple[str, str]:
        """The address and the interface of this host, as the others see it."""
        return own_address(self._membership.address)

    @property
    def name(self) -> str:
        """Of this host in the run."""
        return self._membership.credentials.name

    @property
    def _taken(self) -> int:
        mail = self._decisions.state.mail.get(HEAD_PEER)
        return 0 if mail is None else mail.taken

    def turn(self, now: float) -> None:
        """Connect where there is no link, say that this host is there, and send what is queued."""
        self._jobs.collect()
        if self._link is None:
            if now - self._heard_at > (DISMISSED_S if self.dismissed else ABANDONED_S):
                self._heard_at = now
                self._end("the head of the run, which cannot be reached any more")
                self.calls.abandon()
            if self._jobs.is_idle and now >= self._again_at:
                connect = partial(connect_secure, self._membership.address, self._membership.credentials, to_member)
                self._jobs.do("connecting to the head", connect, self._connected)
            return
        self._heard_at = now
        try:
            if self._greeted and now >= self._beat_at:
                self._beat_at = now + BEAT_S
                self._link.queue(Beat(self._taken, time.time(), self.reports.ahead_max))
                if (seen := self.reports.seen()) is not None:
                    self._link.queue(seen)
            for taken in self.reports.step(now):
                self._link.queue(taken)
            self._link.flush()
        except ArgosyError:
            self._lost()

    @property
    def is_busy(self) -> bool:
        """Whether there is something to send, or stacks are being taken."""
        return self.reports.is_busy or (self._link is not None and self._link.wants_write)

    def post(self, letter: Letter) -> None:
        """Send a report; one that finds no link waits in the mail."""
        if isinstance(letter.content, Report):
            self._queue(ReportPosted(letter.number, letter.run, letter.content))

    def say(self, text: str) -> None:
        """A line for the user of the run."""
        self._queue(HostSays(text))

    def ask(self, client: Link[ToAgent], message: FromRank) -> None:
        """Pass on what a rank wants; without a link it is asked to say it again when there is one."""
        number = self._clients.get(client)
        if number is None:
            number = self._clients[client] = next(_numbers)
        self._queue(RankAsked(number, message))

    def engine_ends(self, *, lost: bool) -> None:
        """The engine ends this host, or is gone (`lost`): the head decides what follows, if it can be reached."""
        self.dismissed = True
        self._queue(HostEnds(lost))

    def forget(self, client: Link[ToAgent]) -> None:
        """A rank's connection ended."""
        if (number := self._clients.pop(client, None)) is not None:
            self._queue(RankLeft(number))

    def _queue(self, message: object) -> None:
        if self._link is not None and self._greeted:
            try:
                self._link.queue(message)
            except ArgosyError:
                self._lost()

    def _connected(self, outcome: "SecureLink[ToMember] | Exception") -> None:
        if isinstance(outcome, Exception):
            self._again_at = time.monotonic() + AGAIN_S
            return
        self._link, self._greeted = outcome, False
        self._selector.register(outcome, selectors.EVENT_READ, self._serve)
        with suppress(ArgosyError):  # Its end is seen when it is read.
            outcome.send(HostHello(self._taken))
        self._serve()

    def _serve(self) -> None:
        if self._link is None:
            return
        try:
            self._link.flush()
            for message in self._link.receive():
                self._hear(message)
        except ArgosyError:
            self._lost()

    def _lost(self) -> None:
        """The link ended: connect again."""
        if (link := self._link) is None:
            return
        self._link, self._greeted = None, False
        self._again_at = time.monotonic() + AGAIN_S
        self._selector.unregister(link)
        link.close()
        self.reports.tunnels.close()

    def _hear(self, message: ToMember) -> None:
        match message:
            case HeadHello(taken, environment):
                self.environment, self._greeted = environment, True
                self._decisions.feed(Connected(HEAD_PEER, taken))
                for client in list(self._clients):  # What they asked for went to a link that is gone.
                    self.calls.end_client(client)
            case OrderPosted(number, run, order):
                if isinstance(order, AcceptRun) and number == self._taken + 1:
                    self.calls.accept(run, order)
                self._decisions.feed(Letter(HEAD_PEER, number, run, order))
            case Beat(taken, clock):
                self.reports.ahead_max = min(self.reports.ahead_max, time.time() - clock)
                mail = self._decisions.state.mail.get(HEAD_PEER)
                if mail is not None and mail.waiting and mail.waiting[0].number <= taken:
                    self._decisions.feed(Acknowledged(HEAD_PEER, taken))
            case RankAnswered(number, answer):
                client = next((client for client, known in self._clients.items() if known == number), None)
                if client is not None:
                    with suppress(ArgosyError):  # A rank that is gone waits for nothing.
                        client.send(answer)
            case PassSignal(number):
                self.calls.pass_signal(number)
            case HostTunnel():
                self.reports.tunnels.hear(message)
            case TakeHostStacks():
                self.reports.take(message)
            case Dismissed():
                self._end("the head of the run")

    def _end(self, by: str) -> None:
        self.dismissed = True
        self.calls.dismiss(by)
