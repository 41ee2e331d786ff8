"""One agent's machines together: its host's, and those of the runs that it heads. What is said between them arrives.

Pure, as they are. Messages within a node are passed on at once. Letters to another node are numbered and kept until it
has taken them, so that they are taken once and in order, whatever connections and agents do meanwhile.

The agent logs each event before it performs its effects. `recover` replays the log after a crash. A log may begin with
the state of an earlier one, so that it stays short.

N1  An event and its effects are one record: none of the effects is performed before the record is written.
N2  After a crash the machines ask again for what is answered (`Recovered`, `HostRecovered`). Of the rest, what is not
    known to have been performed is performed again if that does no harm. A signal is never repeated: a second one
    would mean more than one.
N3  A letter is taken once, in the order of its numbers.
"""

import signal
from collections import deque
from collections.abc import Iterable

import msgspec

from argosy.control import host, run
from argosy.control.host_events import (
    HostEffect,
    HostEvent,
    HostRecovered,
    Ordered,
    QuitWanted,
    RememberSpoiled,
    RetireZygote,
    ToRun,
)
from argosy.control.host_state import HostState
from argosy.control.launch import Launch
from argosy.control.messages import Order, Report
from argosy.control.run_events import Begin, FromHost, Record, Recovered, RunEffect, RunEvent, StopWanted, ToHost
from argosy.control.run_state import RunState

# --- events


class Launched(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A run begins that this node heads; `hosts` names the node of each rank, `spares` those that may replace one."""

    run: str
    number: int
    launch: Launch
    hosts: list[str]
    spares: list[str] = []


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


class Acknowledged(msgspec.Struct, frozen=True, tag=True):
    """Another node has taken our letters up to a number."""

    peer: str
    taken: int


class ShutDown(msgspec.Struct, frozen=True, tag=True):
    """Somebody wants all runs of this node to end, and then its daemons."""

    by: str


class Forgotten(msgspec.Struct, frozen=True, tag=True):
    """A run that this node headed was finished: nothing of it need be remembered."""

    run: str


NodeEvent = Launched | ForRun | ForHost | Letter | Connected | Acknowledged | ShutDown | Forgotten

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
    now: float = 0.0
    """When an event was decided on last."""


Numbered = tuple[int, NodeEffect]


def react(state: NodeState, event: NodeEvent, now: float) -> tuple[NodeState, list[Numbered]]:
    """Decide what follows from `event`, with all that the machines of this node then say to each other."""
    inbox: deque[ForRun | ForHost] = deque()
    out: list[NodeEffect] = []
    state.now = now
    match event:
        case Launched():
            if event.run not in state.runs:
                began = state.runs[event.run] = run.new_run(event.number, event.launch, event.hosts, now)
                began.spares = list(event.spares)
                if state.name not in began.hosts:  # The head has the run's files to clear up.
                    began.hosts.append(state.name)
            inbox.append(ForRun(event.run, Begin()))
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
        case Acknowledged(peer, taken):
            mail = state.mail.setdefault(peer, Mail())
            mail.waiting = [letter for letter in mail.waiting if letter.number > taken]
        case ShutDown(by):
            inbox += [ForRun(name, StopWanted(by, signal.SIGTERM)) for name in state.runs]
            inbox.append(ForHost(QuitWanted()))
        case Forgotten(name):
            ended = state.runs.pop(name, None)
            state.heads.pop(name, None)
            if ended is not None:
                for peer in (*ended.hosts, *ended.spares, *ended.lost):
                    state.mail.pop(peer, None)
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


class Known(msgspec.Struct, frozen=True, tag=True):
    """All that came before, as the state that it led to."""

    state: NodeState


LogRecord = Decided | Performed | Known


def recover(name: str, log: Iterable[LogRecord]) -> tuple[NodeState, list[Numbered]]:
    """Replay a node's log: its state, and the effects to perform now (N2). Feed it `recovered` afterwards."""
    state, pending = NodeState(name), list[Numbered]()
    for record in log:
        match record:
            case Performed(number):
                pending = [each for each in pending if each[0] > number]
            case Known(known):
                state, pending = known, []
            case Decided(event, at):
                try:
                    state, effects = react(state, event, at)
                except Exception as error:
                    _give_up(state, event, at, error)
                else:
                    pending += [each for each in effects if _is_repeated(each[1])]
    return state, pending


def _give_up(state: NodeState, event: NodeEvent, at: float, error: Exception) -> None:
    """An agent died of this event: end the run that it is about, so that the others live."""
    inner = event.event if isinstance(event, ForHost) else event
    name = getattr(inner, "run", "")
    if name not in state.runs:
        raise error
    reason = f"the agent cannot carry it on: {type(inner).__name__}: {error!r}"
    state.runs[name].ended, state.runs[name].outcome, state.runs[name].owed = True, (1, reason, at), {}
    if name in state.host.runs:
        state.host.runs[name].removing = True


def _is_repeated(effect: NodeEffect) -> bool:
    """Whether an effect can be performed twice, and nobody asks for it again."""
    if isinstance(effect, Letter):
        return False  # Letters wait in the mail.
    return isinstance(effect.effect, Record | RetireZygote | RememberSpoiled)


def recovered(state: NodeState) -> list[NodeEvent]:
    """What to feed a node that was recovered: its machines ask again for what was under way, and for wake-ups."""
    return [ForHost(HostRecovered()), *(ForRun(name, Recovered()) for name in state.runs)]
