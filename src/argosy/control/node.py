"""One agent's machines together: its host's, and those of the runs that it heads. What is said between them arrives.

Pure, as they are. Messages within a node are passed on at once. Letters to another node are numbered and kept until it
has taken them, so that they are taken once and in order, whatever connections and agents do meanwhile.

The agent logs each event before it performs its effects. `recover` replays the log after a crash.

N1  An event and its effects are one record: none of the effects is performed before the record is written.
N2  After a crash every effect is performed again that is not known to have been, except signals: performing them is
    idempotent, while a second signal would mean more than one. Effects that are answered are asked for until they are.
N3  A letter is taken once, in the order of its numbers.
"""

from collections import deque
from collections.abc import Iterable

import msgspec

from argosy.control import host, run
from argosy.control.host_events import HostEffect, HostEvent, HostRecovered, HostWakeAt, Ordered, SendSignal, ToRun
from argosy.control.host_state import HostState
from argosy.control.messages import Order, Report, Terms
from argosy.control.restart import Restart
from argosy.control.run_events import FromHost, Recovered, RunEffect, RunEvent, ToHost, WakeAt
from argosy.control.run_state import RunState

# --- events


class Launched(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A run begins that this node heads; `hosts` names the node of each rank."""

    run: str
    launch: int
    dims: dict[str, int]
    restart: Restart
    grace_s: float
    hosts: list[str]
    terms: Terms


class ForRun(msgspec.Struct, frozen=True, tag=True):
    """Something happened to a run that this node heads."""

    run: str
    event: RunEvent


class ForHost(msgspec.Struct, frozen=True, tag=True):
    """Something happened on this node's host."""

    event: HostEvent


class Letter(msgspec.Struct, frozen=True, tag=True):
    """A numbered message between two nodes about a run."""

    peer: str
    """The other node: its sender when it arrives, its receiver when it is posted."""
    number: int
    run: str
    content: Order | Report


class Connected(msgspec.Struct, frozen=True, tag=True):
    """Another node can be reached (again), and has taken our letters up to a number."""

    peer: str
    taken: int


class Forgotten(msgspec.Struct, frozen=True, tag=True):
    """A run that this node headed was finished: nothing of it need be remembered."""

    run: str


NodeEvent = Launched | ForRun | ForHost | Letter | Connected | Forgotten

# --- effects


class OfRun(msgspec.Struct, frozen=True, tag=True):
    """Perform an effect for a run."""

    run: str
    effect: RunEffect


class OfHost(msgspec.Struct, frozen=True, tag=True):
    """Perform an effect on the host."""

    effect: HostEffect


NodeEffect = OfRun | OfHost | Letter


class Mail(msgspec.Struct):
    """The letters from and to one other node."""

    sent: int = 0
    taken: int = 0
    waiting: list[Letter] = []


class NodeState(msgspec.Struct):
    """All that an agent decides on."""

    name: str
    host: HostState = msgspec.field(default_factory=HostState)
    runs: dict[str, RunState] = {}
    heads: dict[str, str] = {}
    """The node that heads each run with ranks here."""
    mail: dict[str, Mail] = {}
    effects: int = 0
    """How many effects were decided on."""


Numbered = tuple[int, NodeEffect]


def react(state: NodeState, event: NodeEvent, now: float) -> tuple[NodeState, list[Numbered]]:
    """Decide what follows from `event`, with all that the machines of this node then say to each other."""
    inbox: deque[ForRun | ForHost] = deque()
    out: list[NodeEffect] = []
    match event:
        case Launched():
            made = run.new_run(event.launch, event.dims, event.restart, event.grace_s, event.hosts)
            made.terms = event.terms
            state.runs[event.run] = made
        case ForRun() | ForHost():
            inbox.append(event)
        case Letter(peer, number, name, content):
            mail = state.mail.setdefault(peer, Mail())
            if number == mail.taken + 1:  # N3
                mail.taken = number
                inbox.append(_arrived(state, peer, name, content))
        case Connected(peer, taken):
            mail = state.mail.setdefault(peer, Mail())
            mail.waiting = [letter for letter in mail.waiting if letter.number > taken]
            out += mail.waiting
        case Forgotten(name):
            state.runs.pop(name, None)
    while inbox:
        _pass_on(state, inbox.popleft(), now, inbox, out)
    first = state.effects + 1
    state.effects += len(out)
    return state, list(enumerate(out, first))


def _arrived(state: NodeState, peer: str, name: str, content: Order | Report) -> ForRun | ForHost:
    if isinstance(content, Order):
        state.heads[name] = peer
        return ForHost(Ordered(name, content))
    return ForRun(name, FromHost(peer, content))


def _pass_on(
    state: NodeState, event: ForRun | ForHost, now: float, inbox: deque[ForRun | ForHost], out: list[NodeEffect]
) -> None:
    """Let one machine react, and sort what it wants: for a machine here, for another node, or to be performed."""
    if isinstance(event, ForRun):
        if event.run not in state.runs:
            return
        _, wanted = run.react(state.runs[event.run], event.event, now)
        for effect in wanted:
            if not isinstance(effect, ToHost):
                out.append(OfRun(event.run, effect))
            elif effect.host == state.name:
                inbox.append(ForHost(Ordered(event.run, effect.order)))
            else:
                out.append(_post(state, effect.host, event.run, effect.order))
    else:
        _, asked = host.react(state.host, event.event, now)
        for effect in asked:
            if not isinstance(effect, ToRun):
                out.append(OfHost(effect))
            elif effect.run in state.runs:
                inbox.append(ForRun(effect.run, FromHost(state.name, effect.report)))
            elif effect.run in state.heads:
                out.append(_post(state, state.heads[effect.run], effect.run, effect.report))


def _post(state: NodeState, peer: str, name: str, content: Order | Report) -> Letter:
    mail = state.mail.setdefault(peer, Mail())
    mail.sent += 1
    letter = Letter(peer, mail.sent, name, content)
    mail.waiting.append(letter)
    return letter


# --- the log


class Decided(msgspec.Struct, frozen=True, tag=True):
    """An event was decided on at a time; its effects follow from it."""

    event: NodeEvent
    at: float


class Performed(msgspec.Struct, frozen=True, tag=True):
    """Effects up to this number were performed."""

    number: int


LogRecord = Decided | Performed


def recover(name: str, log: Iterable[LogRecord]) -> tuple[NodeState, list[Numbered]]:
    """Replay a node's log: its state, and the effects to perform now (N2). Feed it `recovered` afterwards."""
    state, pending = NodeState(name), list[Numbered]()
    for record in log:
        if isinstance(record, Performed):
            pending = [each for each in pending if each[0] > record.number]
        else:
            state, effects = react(state, record.event, record.at)
            pending += effects
    return state, [(number, effect) for number, effect in pending if not _is_once(effect)]


def _is_once(effect: NodeEffect) -> bool:
    """Whether an effect must not be performed twice, or need not be because ticks renew it."""
    match effect:
        case OfRun(effect=WakeAt()) | OfHost(effect=HostWakeAt() | SendSignal()):
            return True
        case _:
            return False


def recovered(state: NodeState) -> list[NodeEvent]:
    """What to feed a node that was recovered: its machines ask again for what was under way, and for wake-ups."""
    return [ForHost(HostRecovered()), *(ForRun(name, Recovered()) for name in state.runs)]
