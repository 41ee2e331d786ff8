"""Decide what happens to one run: its life from the first start to the exit code.

Pure: `react` takes the state, an event and `now`, and returns the next state with the effects to perform.
The agent performs them for real, the tests on virtual time. The agent log holds the events, so that a
restarted agent replays them into the same state.

P1  Evidence is taken before Argosy stops a rank because of a failure.
P2  At most one process of a slot is alive: a generation starts only after the exit of the one before.
P3  Every rank that is told to stop is killed after its grace, so every run ends.
P4  The exit code is that of the first failure; what fails while that one is handled is its consequence.
P5  An event is logged before its effects are performed. The agent may be killed between any two of them: `Recovered`
    asks the next one for all that may be missing. Whatever can be repeated is; a signal is sent at most once.
"""

import signal
from collections.abc import Sequence

import msgspec

from argosy.control import Failure, GiveUp, Restart, decide_restart, facts
from argosy.core import RankId, WaitStatus, format_ranks
from argosy.supervise.agent import effects as do

EVIDENCE_S = 10.0
"""After this long the run goes on without its evidence."""
HANG_CODE = 124


class Slot(msgspec.Struct, frozen=True):
    """One place of the mesh, through its generations."""

    index: int
    generation: int = 0
    pid: int = 0
    """0 unless its process is alive."""
    starting: bool = False
    asked: bool = False
    """Argosy told this generation to stop."""
    status: WaitStatus | None = None

    @property
    def alive(self) -> bool:
        return self.pid != 0 or self.starting


class Turn(msgspec.Struct, frozen=True):
    """A set of ranks on its way down: to be replaced, or for good when `final`."""

    ranks: tuple[int, ...]
    cause: str
    final: bool
    signal: int = signal.SIGTERM
    code: int = 0
    start_at: float = 0.0
    awaiting_evidence_until: float | None = None
    kill_at: float | None = None


class RunState(msgspec.Struct, frozen=True):
    """Everything that decisions about a run depend on."""

    launch: int
    dims: dict[str, int]
    restart: Restart
    grace_s: float
    slots: tuple[Slot, ...]
    began: bool = False
    ended: bool = False
    turns: tuple[Turn, ...] = ()
    failures: tuple[Failure, ...] = ()
    store: int = 0
    """The generation that the store was opened for."""
    owed: tuple[do.TakeEvidence, ...] = ()
    """Evidence that is being taken."""

    @property
    def final(self) -> Turn | None:
        return next((turn for turn in self.turns if turn.final), None)

    def rank(self, index: int) -> RankId:
        return RankId("main", index, self.slots[index].generation)

    def alive(self, indices: Sequence[int] | None = None) -> list[int]:
        chosen = self.slots if indices is None else [self.slots[index] for index in indices]
        return [slot.index for slot in chosen if slot.alive]


class Begin(msgspec.Struct, frozen=True, tag=True):
    """All that the ranks need is ready."""


class Started(msgspec.Struct, frozen=True, tag=True):
    """A rank's process exists."""

    rank: RankId
    pid: int


class Exited(msgspec.Struct, frozen=True, tag=True):
    """A rank's process is gone.

    `grouped`: some rank had formed a process group of torch's own. `managed`: `argosy.Run` owns the step loop.
    `hopeless`: it said that a replacement would fail as well. `own`: it exited or crashed by itself.
    """

    rank: RankId
    status: WaitStatus
    progressed: bool = False
    grouped: bool = False
    managed: bool = False
    hopeless: bool = False
    own: bool = False
    oom: str = ""
    cpu_s: float = 0.0
    max_rss_bytes: int = 0


class StopWanted(msgspec.Struct, frozen=True, tag=True):
    """Somebody wants the run to end; the second time it is killed."""

    by: str
    signal: int
    grace_s: float | None = None


class Hung(msgspec.Struct, frozen=True, tag=True):
    """Rank `index` holds the run up for longer than is tolerated; evidence was taken."""

    index: int
    summary: str
    progressed: bool = True
    grouped: bool = True
    managed: bool = False


class EvidenceTaken(msgspec.Struct, frozen=True, tag=True):
    """The incident that was asked for is on disk (or could not be taken)."""


class Broken(msgspec.Struct, frozen=True, tag=True):
    """The run cannot go on for a reason of Argosy's own, such as a zygote that does not start."""

    reason: str


class Tick(msgspec.Struct, frozen=True, tag=True):
    """Time passed; asked for by `WakeAt`."""


class Recovered(msgspec.Struct, frozen=True, tag=True):
    """Another agent has taken the run over."""


Event = Begin | Started | Exited | StopWanted | Hung | EvidenceTaken | Broken | Tick | Recovered
Step = tuple[RunState, list[do.Effect]]


def new_run(launch: int, dims: dict[str, int], restart: Restart, grace_s: float, size: int) -> RunState:
    """The state before anything happened."""
    return RunState(launch, dims, restart, grace_s, tuple(Slot(index) for index in range(size)))


def react(state: RunState, event: Event, now: float) -> Step:
    """Decide what follows from `event`; performs nothing."""
    if isinstance(event, EvidenceTaken):
        turns = tuple(msgspec.structs.replace(turn, awaiting_evidence_until=None) for turn in state.turns)
        state = msgspec.structs.replace(state, turns=turns, owed=())
    if state.ended:
        return state, [*state.owed, _finish(state)] if isinstance(event, Recovered) else []
    match event:
        case Begin():
            state, effects = _begin(state)
        case Started():
            state, effects = _started(state, event, now)
        case Exited():
            state, effects = _exited(state, event, now)
        case StopWanted():
            state, effects = _stop(state, event, now)
        case Hung(index, summary):
            generation = state.slots[index].generation
            cause = f"rank {index}: {summary}"
            failure = Failure(index, now, event.progressed, cause, generation, event.managed)
            state, effects = _failed(state, failure, HANG_CODE, event.grouped)
        case Broken(reason):
            turn = Turn(_everyone(state), reason, final=True, code=1, kill_at=None)
            state, effects = msgspec.structs.replace(state, turns=(turn,)), []
        case Recovered():
            effects = _repeat(state)
        case EvidenceTaken() | Tick():
            effects = []
    state, more = _advance(state, now)
    return state, effects + more


def _begin(state: RunState) -> Step:
    if state.began or state.final:
        return state, []
    ranks = tuple(state.rank(slot.index) for slot in state.slots)
    slots = tuple(msgspec.structs.replace(slot, starting=True) for slot in state.slots)
    state = msgspec.structs.replace(state, began=True, slots=slots)
    return state, [do.OpenStore(0), do.Start(ranks)]


def _repeat(state: RunState) -> list[do.Effect]:
    """What may not have been performed, and does no harm when it is performed again (P5)."""
    if not state.began:
        return []
    waiting = tuple(state.rank(slot.index) for slot in state.slots if slot.starting)
    return [do.OpenStore(state.store), *state.owed, *([do.Start(waiting, again=True)] if waiting else [])]


def _finish(state: RunState) -> do.Finish:
    if (final := state.final) is not None:
        return do.Finish(final.code, final.cause)
    return do.Finish(0, "every rank ended with exit code 0")


def _started(state: RunState, event: Started, now: float) -> Step:
    slot = state.slots[event.rank.index]
    if event.rank.generation != slot.generation or not slot.starting:
        return state, [do.Kill((event.rank,))]  # P2: nobody waits for this one any more.
    state = _with_slot(state, msgspec.structs.replace(slot, pid=event.pid, starting=False))
    effects: list[do.Effect] = [do.Record(facts.RankStarted(at=now, rank=event.rank, pid=event.pid))]
    if slot.asked:
        effects.append(do.Signal((event.rank,), signal.SIGTERM))
    return state, effects


def _exited(state: RunState, event: Exited, now: float) -> Step:
    slot = state.slots[event.rank.index]
    if event.rank.generation != slot.generation or not slot.alive:
        return state, []
    fact = facts.RankExited(
        at=now,
        rank=event.rank,
        pid=slot.pid,
        status=event.status,
        asked=slot.asked,
        oom=event.oom,
        cpu_s=event.cpu_s,
        max_rss_bytes=event.max_rss_bytes,
    )
    state = _with_slot(state, msgspec.structs.replace(slot, pid=0, starting=False, status=event.status))
    effects: list[do.Effect] = [do.Record(fact)]
    handled = slot.asked or any(slot.index in turn.ranks for turn in state.turns)
    if event.status.ok or handled:
        return state, effects
    cause = f"rank {slot.index}: {event.oom or event.status}"
    failure = Failure(
        slot.index, now, event.progressed, cause, slot.generation, event.managed, event.hopeless, event.own
    )
    state, more = _failed(state, failure, event.status.shell_code, event.grouped)
    return state, effects + more


def _failed(state: RunState, failure: Failure, code: int, grouped: bool) -> Step:
    """Restart what the policy says, or end the run with `code`."""
    index, now = failure.index, failure.at
    if state.final or any(index in turn.ranks for turn in state.turns):
        return state, []  # P4
    state = msgspec.structs.replace(state, failures=(*state.failures, failure))
    decision = decide_restart(state.restart, state.failures, state.dims)
    failed = state.rank(index)
    evidence = do.TakeEvidence(failed, failure.cause)
    effects: list[do.Effect] = []
    if isinstance(decision, GiveUp):
        if state.restart.policy not in ("auto", "never") or failure.managed:
            effects.append(do.Record(facts.GaveUp(at=now, reason=decision.reason, failed=failed)))
        turn = Turn(_everyone(state), failure.cause, final=True, code=code)
    else:
        ranks, note = decision.ranks, ""
        if grouped and not failure.managed and len(ranks) < len(state.slots):
            ranks = _everyone(state)
            note = "torch's own process group cannot take one rank back"
        turn = Turn(ranks, failure.cause, final=False, start_at=now + decision.delay_s)
        fact = facts.Restarting(
            at=now,
            ranks=list(ranks),
            generation=_next_generation(state, ranks),
            cause=failure.cause,
            failed=failed,
            note=note,
            delay_s=decision.delay_s,
        )
        effects.append(do.Record(fact))
    if state.alive(turn.ranks):  # P1
        turn = msgspec.structs.replace(turn, awaiting_evidence_until=now + EVIDENCE_S)
    state = msgspec.structs.replace(state, turns=_merge(state.turns, turn), owed=(*state.owed, evidence))
    return state, [*effects, evidence]


def _stop(state: RunState, event: StopWanted, now: float) -> Step:
    fact = do.Record(facts.StopAsked(at=now, by=event.by, signal=event.signal))
    final = state.final
    if final is not None:  # Asked twice, or asked during the end: no more grace.
        hurried = msgspec.structs.replace(
            final, kill_at=now, awaiting_evidence_until=None, code=final.code or 128 + event.signal
        )
        return msgspec.structs.replace(state, turns=(hurried,)), [fact]
    grace_s = state.grace_s if event.grace_s is None else event.grace_s
    turn = Turn(_everyone(state), f"stopped by {event.by}", final=True, signal=event.signal, code=128 + event.signal)
    state, effects = _tell(msgspec.structs.replace(state, turns=(turn,)), turn, now + grace_s)
    return state, [fact, *effects]


def _advance(state: RunState, now: float) -> Step:
    """Carry every turn as far as it can go at `now`, and end the run if nothing is left to do."""
    effects: list[do.Effect] = []
    for turn in state.turns:
        state, more = _advance_turn(state, turn, now)
        effects += more
    if not state.turns and state.began and not state.alive():
        state = msgspec.structs.replace(state, ended=True)
        effects.append(_finish(state))
    return state, effects


def _advance_turn(state: RunState, turn: Turn, now: float) -> Step:
    if turn.awaiting_evidence_until is not None:
        if now < turn.awaiting_evidence_until and state.alive(turn.ranks):
            return state, [do.WakeAt(turn.awaiting_evidence_until)]
        turn, state = _replaced_turn(state, turn, msgspec.structs.replace(turn, awaiting_evidence_until=None))
    alive = state.alive(turn.ranks)
    if alive:
        if turn.kill_at is None:
            return _tell(state, turn, now + state.grace_s)
        if now < turn.kill_at:
            return state, [do.WakeAt(turn.kill_at)]
        ranks = tuple(state.rank(index) for index in alive)
        turn, state = _replaced_turn(state, turn, msgspec.structs.replace(turn, kill_at=now + 1.0))
        return state, [do.Kill(ranks), do.WakeAt(now + 1.0)]  # P3: again, until it is gone.
    if turn.final:
        state = msgspec.structs.replace(state, ended=True)
        return state, [_finish(state)]
    if now < turn.start_at:
        return state, [do.WakeAt(turn.start_at)]
    return _restart(state, turn)


def _tell(state: RunState, turn: Turn, kill_at: float) -> Step:
    """Ask the turn's living ranks to end until `kill_at`."""
    alive = state.alive(turn.ranks)
    slots = tuple(msgspec.structs.replace(slot, asked=True) if slot.index in alive else slot for slot in state.slots)
    _, state = _replaced_turn(state, turn, msgspec.structs.replace(turn, kill_at=kill_at))
    state = msgspec.structs.replace(state, slots=slots)
    if not alive:
        return state, []
    ranks = tuple(state.rank(index) for index in alive)
    return state, [do.Signal(ranks, turn.signal), do.WakeAt(kill_at)]


def _restart(state: RunState, turn: Turn) -> Step:
    generation = _next_generation(state, turn.ranks)
    fresh = {index: Slot(index, generation, starting=True) for index in turn.ranks}
    everyone = len(turn.ranks) == len(state.slots)
    state = msgspec.structs.replace(
        state,
        slots=tuple(fresh.get(slot.index, slot) for slot in state.slots),
        turns=tuple(other for other in state.turns if other is not turn),
        store=generation if everyone else state.store,
    )
    effects: list[do.Effect] = [do.OpenStore(generation)] if everyone else []
    return state, [*effects, do.Start(tuple(state.rank(index) for index in turn.ranks))]


def _merge(turns: tuple[Turn, ...], turn: Turn) -> tuple[Turn, ...]:
    """Add a turn; those that it overlaps, or all if it is final, become part of it."""
    apart: list[Turn] = []
    for other in turns:
        if turn.final:
            continue
        if set(other.ranks) & set(turn.ranks):
            ranks = tuple(sorted({*other.ranks, *turn.ranks}))
            turn = msgspec.structs.replace(turn, ranks=ranks, start_at=max(other.start_at, turn.start_at))
        else:
            apart.append(other)
    return (*apart, turn)


def _everyone(state: RunState) -> tuple[int, ...]:
    return tuple(range(len(state.slots)))


def _next_generation(state: RunState, ranks: Sequence[int]) -> int:
    return max(state.slots[index].generation for index in ranks) + 1


def _with_slot(state: RunState, slot: Slot) -> RunState:
    slots = (*state.slots[: slot.index], slot, *state.slots[slot.index + 1 :])
    return msgspec.structs.replace(state, slots=slots)


def _replaced_turn(state: RunState, old: Turn, new: Turn) -> tuple[Turn, RunState]:
    turns = tuple(new if turn is old else turn for turn in state.turns)
    return new, msgspec.structs.replace(state, turns=turns)


def describe(state: RunState) -> str:
    """One word or two for `argosy ps`."""
    if state.ended:
        return "ending"
    if not state.began:
        return "starting"
    if state.final:
        return "stopping"
    if state.turns:
        return f"restarting {format_ranks([index for turn in state.turns for index in turn.ranks])}"
    return "running"
