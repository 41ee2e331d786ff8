"""What agents of different hosts say to each other: the head of a run (`ToHead`) and its hosts (`ToMember`).

Orders and reports are letters of `control/node.py`. All else may be lost with a connection.
"""

import math

import msgspec

from argosy.control import Order, Report
from argosy.core import RankId
from argosy.fabric import Arrive, BoardAdd, BoardAnswer, BoardGet, BoardSet, NotMember, Released
from argosy.observe import RankProgress
from argosy.supervise.evidence.frames import Stack
from argosy.supervise.evidence.proc_sample import ProcSample
from argosy.supervise.messages import Message, OpenTunnel, TunnelClosed, TunnelData, TunnelTook

BEAT_S = 0.5
FromRank = Arrive | BoardSet | BoardAdd | BoardGet
ForRank = BoardAnswer | NotMember | Released


class Beat(Message, frozen=True):
    """I am there, and have taken your letters up to this number."""

    taken: int
    clock: float = 0.0
    """The sender's time, since the epoch."""
    ahead_max: float = math.inf
    """From a host: its clock is ahead of the head's by no more than this."""


TunnelContent = OpenTunnel | TunnelData | TunnelTook | TunnelClosed


class HostTunnel(Message, frozen=True):
    """What a client of the head and a process on a host tell each other."""

    number: int
    content: TunnelContent


# --- a host to the head


class HostHello(Message, frozen=True):
    """A host has connected, for the first time or again; answered by `HeadHello`.

    One that cannot serve says why instead, and is dismissed.
    """

    taken: int
    unfit: str = ""


class ReportPosted(Message, frozen=True):
    """A numbered letter."""

    number: int
    run: str
    report: Report


class RankAsked(Message, frozen=True):
    """A rank of this host wants something of the run's board or barrier; answered by `RankAnswered`."""

    client: int
    message: FromRank


class RankLeft(Message, frozen=True):
    """A rank that asked waits for nothing any more."""

    client: int


class HostSays(Message, frozen=True):
    """A line for the user of the run."""

    text: str


class HostEnds(Message, frozen=True):
    """The engine has told this host to end: what the run wants to keep it has to save now."""

    lost: bool = False
    """What the engine had on this host died: the host ends now."""


class RankSeen(msgspec.Struct, frozen=True):
    """What a rank's page and its process show."""

    rank: RankId
    progress: RankProgress | None
    proc: ProcSample | None
    paused: bool = False


class RanksSeen(Message, frozen=True):
    """What the ranks of this host show now; sent with the beats."""

    ranks: list[RankSeen]


class StacksTaken(Message, frozen=True):
    """The answer to `TakeHostStacks`."""

    number: int
    stacks: dict[int, Stack]


ToHead = (
    Beat | HostHello | ReportPosted | RankAsked | RankLeft | HostSays | HostEnds | RanksSeen | StacksTaken | HostTunnel
)

# --- the head to a host


class HeadHello(Message, frozen=True):
    """The host is in the run; the head has taken its letters up to a number. `environment` is the run's, sealed."""

    taken: int
    environment: bytes


class OrderPosted(Message, frozen=True):
    """A numbered letter."""

    number: int
    run: str
    order: Order


class RankAnswered(Message, frozen=True):
    """What a rank asked for."""

    client: int
    answer: ForRank


class PassSignal(Message, frozen=True):
    """Send a signal to every rank of the run on this host."""

    signal: int


class Dismissed(Message, frozen=True):
    """The run does not need the host any more: end everything on it."""


class TakeHostStacks(Message, frozen=True):
    """Look where these ranks are, those in `native` with C frames; answered by `StacksTaken`."""

    number: int
    run: str
    ranks: list[RankId]
    native: list[int]
    deadline_s: float


ToMember = Beat | HeadHello | OrderPosted | RankAnswered | PassSignal | Dismissed | TakeHostStacks | HostTunnel

to_head: msgspec.msgpack.Decoder[ToHead] = msgspec.msgpack.Decoder(ToHead)
to_member: msgspec.msgpack.Decoder[ToMember] = msgspec.msgpack.Decoder(ToMember)
