"""Decide what happens to one run, from its first start to its exit code.

Pure: `react` takes the state, an event and `now`, changes the state and returns the effects to perform. The agent
performs them for real, a simulated machine on virtual time. `now` never goes back.

P1  Evidence is taken before Argosy stops a rank because of a failure.
P2  At most one generation of a slot is in the current view: a generation starts after the exit of the one before.
P3  Every rank that is told to stop is killed after its grace, so every run ends.
P4  The exit code is that of the first failure; what fails while that one is handled is its consequence.
P5  What a rank or host says of an older generation changes nothing.
P6  An event about one rank costs the same in a run of any size.
P7  What a lost host says changes nothing; its ranks are in no later view, and are killed if it comes back.
"""

import signal
from collections.abc import Callable, Iterable

from argosy.control import facts
from argosy.control.device_faults import DeviceFault, devices_given, explain_fault, replace_device
from argosy.control.launch import Launch
from argosy.control.messages import (
    AcceptRun,
    Cleared,
    ClearRun,
    Exited,
    HostFailed,
    KillRanks,
    Noted,
    OpenStore,
    Order,
    Report,
    SignalRanks,
    Started,
    StartRanks,
    StoreFailed,
    StoreOpened,
)
from argosy.control.restart import Failure, GiveUp, RestartAfter, charge, decide_restart
from argosy.control.run_events import (
    Begin,
    ClientCame,
    ClientLeft,
    EvidenceTaken,
    Finish,
    FromHost,
    HostGone,
    HostSilent,
    Hung,
    Record,
    Recovered,
    RunEffect,
    RunEvent,
    StopWanted,
    TakeEvidence,
    Tick,
    ToHost,
    WakeAt,
)
from argosy.control.run_state import DEVICE_FAILED, MANAGED, REPLACE, RunState, Slot, Takedown
from argosy.core import RankId, WaitStatus, host_label

Effects = list[RunEffect]
Ranks = tuple[RankId, ...]

EVIDENCE_S = 10.0
"""After this long the run proceeds without its evidence."""
CLEAR_S = 15.0
"""After this long the run ends although a host has not said that it cleared up."""
AGAIN_S = 1.0
"""A rank that was killed and is still there is killed again after this long."""
LEASE_S = 10.0
"""How long a client has to come back to a new agent before its run is stopped."""
STEADY_S = 10.0
"""A rank that lived this long counts as having made progress, even if it shows no steps."""
HANG_CODE = 124
CRASHES = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})
"""Signals that a process brings upon itself."""


def new_run(number: int, launch: Launch, hosts: list[str], now: float) -> RunState:
    """The state before anything happened; `hosts` names the host of each rank."""
    slots, hosts = [Slot(host) for host in hosts], list(dict.fromkeys(hosts))
    return RunState(number=number, launch=launch, started_at=now, slots=slots, hosts=hosts)


def react(state: RunState, event: RunEvent, now: float) -> tuple[RunState, Effects]:
    """Decide what follows from `event`; performs nothing. The state that was passed in is used up."""
    out: Effects = []
    if isinstance(event, EvidenceTaken) and state.owed.get(event.rank.index, (None,))[0] == event.rank:
        del state.owed[event.rank.index]
    if state.ended:
        if isinstance(event, Recovered):
            _ask_for_evidence(state, out)
            _finish(state, out)
        return state, out
    match event:
        case Begin():
            if not state.began and not state.final:
                _begin(state, out)
        case FromHost(host, report):
            if host not in state.lost:  # P7
                _reported(state, host, report, now, out)
        case StopWanted():
            _stop(state, event, now, out)
        case ClientCame():
            state.lease_until = None
        case ClientLeft():
            state.lease_until = now
            _look_at_lease(state, now, out)
        case Hung(index, summary):
            failure = _failure(state, index, f"rank {index}: {summary}", now, progressed=True)
            if state.slots[index].pid:
                _failed(state, failure, HANG_CODE, out)
        case HostSilent(host):
            if state.spares and state.outcome is None and _would_restart(state):  # The view fences it: nobody waits.
                _lose_host(state, host, "it is silent", now, out)
        case HostGone(host, reason, joined):
            _lose_host(state, host, reason, now, out, joined=joined)
        case EvidenceTaken(rank):
            takedown = state.takedowns.get(state.slots[rank.index].takedown)
            if takedown is not None and takedown.evidence == rank:  # P1: that of another failure does not count.
                takedown.evidence = None
                _advance(state, takedown, now, out)
        case Tick():
            _tick(state, now, out)
        case Recovered():
            if not state.launch.detached and state.began:
                state.lease_until = now + LEASE_S
            _ask_for_evidence(state, out)
            _tick(state, now, out)
    if state.began and not state.alive and not state.takedowns and state.outcome is None:
        _clear(state, 0, "every rank ended with exit code 0", now, out)
    return state, out


def _tick(state: RunState, now: float, out: Effects) -> None:
    for takedown in list(state.takedowns.values()):
        _advance(state, takedown, now, out)
    _look_at_lease(state, now, out)
    if state.outcome is not None and now >= state.outcome[2]:
        _finish(state, out)
    elif state.outcome is not None:
        out.append(WakeAt(state.outcome[2]))


def _ask_for_evidence(state: RunState, out: Effects) -> None:
    out.extend(TakeEvidence(first, cause) for first, cause in state.owed.values())


def _look_at_lease(state: RunState, now: float, out: Effects) -> None:
    if state.lease_until is not None and now >= state.lease_until:
        state.lease_until = None
        _stop(state, StopWanted("the client is gone", signal.SIGTERM), now, out)
    elif state.lease_until is not None:
        out.append(WakeAt(state.lease_until))


# --- what hosts report


def _reported(state: RunState, host: str, report: Report, now: float, out: Effects) -> None:
    match report:
        case StoreOpened(generation, port, address):
            if generation == state.store_generation and state.opening and host == state.slots[0].host:
                state.port, state.address = port, address
                _start(state, state.opening, out)
                state.opening = set()
        case StoreFailed(generation, reason):
            if generation == state.store_generation and not state.final:
                _take_down(state, _everyone(state, reason, 1), now, out)
        case HostFailed(reason):
            if not state.final and state.outcome is None:
                _take_down(state, _everyone(state, reason, 1), now, out)
        case Started(rank, pid):
            _started(state, rank, pid, now, out)
        case Noted(rank):
            slot = state.slots[rank.index]
            if rank.generation == slot.generation:  # P5
                state.note(slot, report.flags, report.steps, report.collectives)
        case Exited():
            _exited(state, report, now, out)
        case Cleared():
            state.clearing.discard(host)
            if state.outcome is not None and not state.clearing and not state.ended:
                _finish(state, out)


def _started(state: RunState, rank: RankId, pid: int, now: float, out: Effects) -> None:
    slot = state.slots[rank.index]
    if rank.generation != slot.generation or not slot.starting:
        if slot.pid != pid:  # P2: nobody waits for this one any more.
            out.append(ToHost(slot.host, KillRanks((rank,))))
        return
    slot.pid, slot.starting = pid, False
    out.append(Record(facts.RankStarted(at=now, rank=rank, pid=pid)))


def _exited(state: RunState, event: Exited, now: float, out: Effects) -> None:
    index, status = event.rank.index, event.status
    slot = state.slots[index]
    if event.rank.generation != slot.generation or not slot.alive:
        return  # P5
    fault, device = explain_fault(state.launch, state.devices, index, slot.host, event.device)
    if slot.asked or status.ok or not (event.device or slot.flags & DEVICE_FAILED):
        fault, device = None, ""
    out.append(Record(_exit_fact(state, event, now, device)))
    state.leave(index, status)
    if slot.takedown:
        _advance(state, state.takedowns[slot.takedown], now, out)
    elif not status.ok:
        own = (status.code is not None or status.signal in CRASHES) and not (slot.flags & REPLACE or fault)
        if state.managed:  # A rank that ends itself after its first step, time and again, makes no progress.
            moved = slot.moved and not (own and slot.flags & MANAGED and slot.steps < 2)
        else:  # Progress of any rank that was started together with it counts.
            moved = event.lived_s > STEADY_S or state.moved.get(slot.generation, 0) > 0
        cause = f"rank {index}: {device or event.oom or status}"
        failure = _failure(state, index, cause, now, progressed=moved, own=own)
        _failed(state, failure, status.shell_code, out, fault=fault)


def _exit_fact(state: RunState, event: Exited, now: float, device: str = "") -> facts.RankExited:
    slot = state.slots[event.rank.index]
    return facts.RankExited(
        at=now,
        rank=event.rank,
        pid=slot.pid,
        status=event.status,
        asked=slot.asked,
        oom=event.oom,
        cpu_s=event.cpu_s,
        max_rss_bytes=event.max_rss_bytes,
        device=device,
    )


def _failure(state: RunState, index: int, cause: str, now: float, *, progressed: bool, own: bool = False) -> Failure:
    generation = state.slots[index].generation
    return Failure(index, now, progressed, cause, generation, state.managed > 0, state.hopeless > 0, own)


# --- lost hosts


def _would_restart(state: RunState) -> bool:
    """Whether a lost rank is replaced. Else a host that is only silent would end the run."""
    policy = state.launch.restart.policy
    return policy != "never" and (policy != "auto" or state.managed > 0)


def _lose_host(state: RunState, host: str, reason: str, now: float, out: Effects, *, joined: bool = True) -> None:
    """A host is not in the run any more (P7). A spare host takes its place; without one, the run ends."""
    if host in state.spares:
        state.spares.remove(host)
        state.lost.append(host)
        out.append(ToHost(host, ClearRun()))
    if host not in state.hosts:
        return
    indices = [index for index, slot in enumerate(state.slots) if slot.host == host]
    wanted = bool(state.opening.intersection(indices)) or any(state.slots[index].takedown for index in indices)
    spare = state.spares.pop(0) if state.spares and indices and not state.final and state.outcome is None else ""
    gone = [index for index in indices if state.slots[index].alive and index not in state.opening]
    unborn = not joined and bool(spare) and not any(state.slots[index].takedown for index in gone)
    gone, moved = ([], gone) if unborn else (gone, [])  # Those start on the spare host as they are.
    state.hosts.remove(host)
    state.lost.append(host)
    fact = facts.HostLost(at=now, host=host_label(host), reason=reason, ranks=gone, spare=host_label(spare))
    out.append(Record(fact))
    if gone:  # If it comes back.
        out.append(ToHost(host, KillRanks(tuple(map(state.rank, gone)))))
    out.append(ToHost(host, ClearRun()))
    if spare:
        state.hosts.append(spare)
        for index in indices:
            state.slots[index].host = spare
        if state.opening and 0 in indices:
            out.append(ToHost(spare, OpenStore(state.store_generation)))
        if moved:
            _start(state, moved, out)
    for index in gone:
        out.append(Record(_exit_fact(state, Exited(state.rank(index), WaitStatus()), now)))
        state.leave(index, WaitStatus())
    failed = [index for index in gone if not state.slots[index].takedown]
    cause = f"host {host_label(host)}: {reason}"
    if not spare and (failed or wanted) and not state.final:
        _take_down(state, _everyone(state, f"{cause}, and there is no spare host", 1), now, out)
    elif failed:
        failure = _failure(state, failed[0], cause, now, progressed=any(state.slots[index].moved for index in failed))
        _failed(state, failure, 1, out, failed)
    for takedown in list(state.takedowns.values()):
        _advance(state, takedown, now, out)
    state.clearing.discard(host)
    if state.outcome is not None and not state.clearing:
        _finish(state, out)


# --- failures and stops


def _failed(
    state: RunState,
    failure: Failure,
    code: int,
    out: Effects,
    lost: Iterable[int] = (),
    fault: DeviceFault | None = None,
) -> None:
    """Restart what the policy says and what was `lost` together with the failed rank, or end the run with `code`."""
    index, now = failure.index, failure.at
    if state.final or state.slots[index].takedown:
        return  # P4
    state.budget = charge(state.budget, failure)
    decision = decide_restart(state.launch.restart, state.budget, state.launch.dims)
    failed, cause = state.rank(index), failure.cause
    state.owed[index] = (failed, cause)
    ranks, note = {*(decision.ranks if isinstance(decision, RestartAfter) else ()), *lost}, ""
    if state.grouped and not failure.managed and len(ranks) < len(state.slots):
        ranks, note = set(range(len(state.slots))), "torch's own process group cannot take one rank back"
    if isinstance(decision, RestartAfter) and any(state.slots[each].host in state.lost for each in ranks):
        decision = GiveUp("a host is lost and there is no spare host")
    if fault is not None and isinstance(decision, RestartAfter):
        given = replace_device(state.launch, state.devices, index, state.slots[index].host, fault, now)
        if isinstance(given, GiveUp):
            decision = given
        elif given is not None:
            out.append(Record(given))
    if isinstance(decision, GiveUp):
        if state.launch.restart.policy not in ("auto", "never") or failure.managed:
            out.append(Record(facts.GaveUp(at=now, reason=decision.reason, failed=failed)))
        takedown = _everyone(state, cause, code)
    else:
        fact = facts.Restarting(
            at=now,
            ranks=sorted(ranks),
            generation=_next_generation(state, ranks),
            cause=cause,
            failed=failed,
            note=note,
            delay_s=decision.delay_s,
        )
        out.append(Record(fact))
        takedown = Takedown(ranks, cause, start_at=now + decision.delay_s)
    out.append(TakeEvidence(failed, cause))
    takedown.evidence = failed
    _take_down(state, takedown, now, out)


def _stop(state: RunState, event: StopWanted, now: float, out: Effects) -> None:
    out.append(Record(facts.StopAsked(at=now, by=event.by, signal=event.signal)))
    if state.outcome is not None:
        return
    if not state.final:
        takedown = _everyone(state, f"stopped by {event.by}", 128 + event.signal)
        takedown.signal = event.signal
        takedown.grace_s = event.grace_s
        _take_down(state, takedown, now, out)
        return
    final = state.takedowns[state.final]  # Asked twice, or asked during the end: no more grace.
    final.kill_at, final.evidence, final.code = now, None, final.code or 128 + event.signal
    _advance(state, final, now, out)


def _everyone(state: RunState, cause: str, code: int) -> Takedown:
    """The takedown that ends the run."""
    return Takedown(set(range(len(state.slots))), cause, final=True, code=code)


def _take_down(state: RunState, takedown: Takedown, now: float, out: Effects) -> None:
    """Begin to stop ranks. Takedowns that overlap with this one, or all if it is final, become part of it."""
    state.takedowns_made += 1
    number = takedown.number = state.takedowns_made
    overlapping = {state.slots[index].takedown for index in takedown.ranks} - {0}
    for other in [state.takedowns.pop(each) for each in (list(state.takedowns) if takedown.final else overlapping)]:
        takedown.ranks |= other.ranks
        takedown.start_at = max(takedown.start_at, other.start_at)
    takedown.alive = {index for index in takedown.ranks if state.slots[index].alive}
    state.takedowns[number] = takedown
    state.final = number if takedown.final else state.final
    for index in takedown.ranks:
        state.slots[index].takedown = number
    if takedown.final:
        for index in state.opening:  # They were to start when their store listens: they never will.
            state.leave(index, None)
        state.opening = set()
    takedown.evidence = takedown.evidence if takedown.alive else None  # P1
    takedown.evidence_until = now + EVIDENCE_S
    _advance(state, takedown, now, out)


def _advance(state: RunState, takedown: Takedown, now: float, out: Effects) -> None:
    """Carry a takedown as far as it can go at `now`."""
    if takedown.alive:
        if takedown.evidence and now < takedown.evidence_until:
            out.append(WakeAt(takedown.evidence_until))
        elif takedown.kill_at is None:
            _tell(state, takedown, now, out)
        elif now < takedown.kill_at:
            out.append(WakeAt(takedown.kill_at))
        else:  # P3: again, until it is gone.
            takedown.kill_at = now + AGAIN_S
            _order(state, takedown.alive, KillRanks, out)
            out.append(WakeAt(takedown.kill_at))
    elif takedown.final:
        del state.takedowns[takedown.number]
        _clear(state, takedown.code, takedown.cause, now, out)
    elif now < takedown.start_at:
        out.append(WakeAt(takedown.start_at))
    else:
        del state.takedowns[takedown.number]
        generation = _next_generation(state, takedown.ranks)
        if len(takedown.ranks) == len(state.slots):
            _open(state, takedown.ranks, generation, out)
        else:
            for index in takedown.ranks:
                state.renew(index, generation)
            _start(state, takedown.ranks, out)


def _tell(state: RunState, takedown: Takedown, now: float, out: Effects) -> None:
    """Ask the living ranks of a takedown to end within their grace. Nobody is asked twice: that would mean more."""
    takedown.kill_at = now + (state.launch.grace_s if takedown.grace_s is None else takedown.grace_s)
    asked = [index for index in takedown.alive if not state.slots[index].asked]
    for index in asked:
        state.slots[index].asked = True
    _order(state, asked, lambda ranks: SignalRanks(ranks, takedown.signal), out)
    out.append(WakeAt(takedown.kill_at))


# --- starting and ending


def _begin(state: RunState, out: Effects) -> None:
    fact = facts.LaunchStarted(
        at=state.started_at,
        launch=state.number,
        argv=state.launch.argv,
        size=len(state.slots),
        host=host_label(state.hosts[0]),
    )
    out.append(Record(fact))
    out.extend(ToHost(host, AcceptRun(state.number, state.launch)) for host in state.hosts)
    out.extend(ToHost(host, AcceptRun(state.number, state.launch, warm=True)) for host in state.spares)
    _open(state, range(len(state.slots)), 0, out)
    state.began = True


def _open(state: RunState, indices: Iterable[int], generation: int, out: Effects) -> None:
    """Start all ranks of a new generation, as soon as their store listens on the host of rank 0."""
    for index in indices:
        state.renew(index, generation)
    state.opening = set(indices)
    state.store_generation = generation
    out.append(ToHost(state.slots[0].host, OpenStore(generation)))


def _start(state: RunState, indices: Iterable[int], out: Effects) -> None:
    """Open the next view; every host hears of it, with the ranks that it starts."""
    state.view += 1
    ranks: dict[str, list[RankId]] = {host: [] for host in state.hosts}
    for index in sorted(indices):
        ranks[state.slots[index].host].append(state.rank(index))
    for host, chosen in ranks.items():
        devices = devices_given(state.devices, host, [rank.index for rank in chosen])
        out.append(ToHost(host, StartRanks(state.view, tuple(chosen), state.port, state.address, devices)))


def _clear(state: RunState, code: int, reason: str, now: float, out: Effects) -> None:
    """Every rank is gone: have the hosts clear up, then finish."""
    state.outcome = (code, reason, now + CLEAR_S)
    state.clearing = set(state.hosts)
    out.extend(ToHost(host, ClearRun()) for host in (*state.hosts, *state.spares))
    out.append(WakeAt(now + CLEAR_S))


def _finish(state: RunState, out: Effects) -> None:
    assert state.outcome is not None
    state.ended = True
    out.append(Finish(state.outcome[0], state.outcome[1]))


def _order(state: RunState, indices: Iterable[int], order: Callable[[Ranks], Order], out: Effects) -> None:
    """Send each host the order for those of the ranks that it has."""
    ranks: dict[str, list[RankId]] = {}
    for index in sorted(indices):
        ranks.setdefault(state.slots[index].host, []).append(state.rank(index))
    out.extend(ToHost(host, order(tuple(chosen))) for host, chosen in ranks.items())


def _next_generation(state: RunState, ranks: Iterable[int]) -> int:
    return max(state.slots[index].generation for index in ranks) + 1
