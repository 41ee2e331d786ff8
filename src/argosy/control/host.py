"""Decide about the processes of one host: what is started by whom, what is reported, what is left when a run is over.

Pure: `react` takes the state, an event and `now`, changes the state and returns the effects to perform. It obeys the
machines of runs (`run.py`) and decides nothing about what a run does next.

H1  Every rank that a run ordered is reported as exited, once: also if it never came into being.
H2  A process that is not the newest generation of its slot, or that nobody ordered, is killed.
H3  A rank whose starter is gone is killed by its marks before another one starts: it may exist unseen.
H4  A signal is sent once; to a rank that does not exist yet, when it does.
"""

from collections.abc import Iterable

from argosy.control.host_events import (
    AskKernel,
    ChildEnded,
    ChildForked,
    ChildRefused,
    ChildSilent,
    EndDaemons,
    EnvironmentLost,
    ForkRanks,
    HostEffect,
    HostEvent,
    HostRecovered,
    HostTick,
    HostWakeAt,
    KillTree,
    ListenFor,
    Ordered,
    PageRead,
    QuitWanted,
    RemoveRun,
    RunRemoved,
    SendSignal,
    StoreEnded,
    StoreForked,
    StoreListens,
    TellUser,
    ToRun,
    TreeKilled,
    WardenCame,
    WardenLost,
    ZygoteCame,
    ZygoteLoaded,
    ZygoteLost,
    ZygoteRefused,
    ZygoteSpawned,
)
from argosy.control.host_state import HostState, LocalRank, LocalRun, TorchStore
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
    SignalRanks,
    Started,
    StartRanks,
    StoreFailed,
    StoreOpened,
)
from argosy.control.zygotes import (
    RETURN_S,
    give_up_zygote,
    spawn_again,
    trim_zygotes,
    want_zygote,
    zygote_came,
    zygote_for,
    zygote_loaded,
    zygote_lost,
)
from argosy.core import ProcessId, RankId, WaitStatus

REPORT_S = 1.0
"""How long a parent has to report an exit before the kernel is asked."""

Effects = list[HostEffect]


def react(state: HostState, event: HostEvent, now: float) -> tuple[HostState, Effects]:
    """Decide what follows from `event`; performs nothing. The state that was passed in is used up."""
    out: Effects = []
    match event:
        case Ordered(run, AcceptRun(number, launch, warm)):
            key = "" if launch.kind == "program" else zygote_for(state, launch.key)
            local_run = state.runs.setdefault(run, LocalRun(number, launch, key))
            if warm and key:
                want_zygote(state, run, local_run, now, out)
            state.linger_s, state.idle_since = launch.linger_s, None
        case Ordered(run, order):
            if run in state.runs:
                _obey(state, run, order, now, out)
        case ChildForked() | ChildRefused() | ChildEnded() | ChildSilent() | PageRead():
            _child(state, event, now, out)
        case TreeKilled(run, rank):
            _tree_killed(state, run, rank, now, out)
        case ZygoteSpawned(key, process):
            if (zygote := state.zygotes.get(key)) is not None and zygote.phase == "spawned":
                zygote.process = process
        case ZygoteCame(key, process):
            zygote_came(state, event, out)
            _ask_again(state, key, process)
            _start_waiting(state, now, out)
        case ZygoteLoaded():
            zygote_loaded(state, event, out)
            _start_waiting(state, now, out)
        case ZygoteLost(key, process):
            if key in state.zygotes and state.zygotes[key].process == process:
                _forget_asked(state, key, out)
            zygote_lost(state, event, out)
            _start_waiting(state, now, out)
        case WardenCame():
            spawn_again(state, out)
            _ask_again(state, "", None)
            _start_waiting(state, now, out)
        case WardenLost():
            _forget_asked(state, "", out)
        case ZygoteRefused(key, reason):
            give_up_zygote(state, key, f"the interpreter cannot be executed: {reason}", out)
            _start_waiting(state, now, out)
        case StoreListens() | StoreForked() | StoreEnded():
            _store(state, event, out)
        case EnvironmentLost(run, reason):
            _environment_lost(state, run, reason, out)
        case QuitWanted():
            state.linger_s = 0.0
            _tick(state, now, out)
        case RunRemoved(run):
            if state.runs.pop(run, None) is not None:
                out.append(ToRun(run, Cleared()))
                state.idle_since = None if state.runs else now
                trim_zygotes(state, out)
                _tick(state, now, out)
        case HostTick():
            _tick(state, now, out)
        case HostRecovered():
            _recovered(state, now, out)
            _tick(state, now, out)
    return state, out


def _recovered(state: HostState, now: float, out: Effects) -> None:
    """Ask again for what will not be answered. Who started ranks says so when it connects (`_ask_again`)."""
    for name, run in state.runs.items():
        if run.listening is not None:
            port = run.launch.master_port if run.store is None else run.store.port
            out.append(ListenFor(name, run.listening, port))
        out += [KillTree(name, rank) for rank in sorted(run.killing)]
        if run.removing:
            out.append(RemoveRun(name))
    for key, zygote in list(state.zygotes.items()):
        if zygote.process is None:
            del state.zygotes[key]  # A rank that waits for it starts another one.
        else:
            zygote.phase, zygote.awaited_until = "returning", now + RETURN_S
    state.quitting = False
    state.idle_since = None if state.runs else now


def _tick(state: HostState, now: float, out: Effects) -> None:
    for key, zygote in [(key, zygote) for key, zygote in state.zygotes.items() if zygote.phase == "returning"]:
        if now < zygote.awaited_until:
            out.append(HostWakeAt(zygote.awaited_until))
        else:
            _forget_asked(state, key, out)
            del state.zygotes[key]
    for name, run in state.runs.items():
        for local in run.ranks.values():
            _ask_kernel_if_late(name, local, now, out)
    _start_waiting(state, now, out)
    if state.idle_since is not None and now >= state.idle_since + state.linger_s:
        if not state.quitting:
            state.quitting = True
            out.append(EndDaemons())
    elif state.idle_since is not None:
        out.append(HostWakeAt(state.idle_since + state.linger_s))


# --- orders of a run


def _obey(state: HostState, name: str, order: Order, now: float, out: Effects) -> None:
    run = state.runs[name]
    match order:
        case OpenStore(generation):
            run.listening, before, run.store = generation, run.store, None
            after = None if before is None else before.process
            out.append(ListenFor(name, generation, run.launch.master_port, after))
        case StartRanks(view, ranks, port, address, devices):
            run.view = view
            for rank in ranks:
                known = run.ranks.get(rank.index)
                if known is None or known.rank.generation < rank.generation:
                    run.ranks[rank.index] = LocalRank(rank, port, address, devices.get(rank.index, ""))
            _start_those(state, name, [run.ranks[rank.index] for rank in ranks], now, out)
        case SignalRanks(ranks, number):
            for local in _those(run, ranks):
                _signal(name, local, number, out)
        case KillRanks(ranks):
            for rank in ranks:
                local = run.ranks.get(rank.index)
                if local is None or local.rank != rank:
                    _kill(state, name, rank, out)  # H2
                elif local.phase == "waiting":
                    _ended(name, local, Exited(rank, WaitStatus(signal=9)), out)
                elif local.phase != "ended":
                    local.doomed = local.asked = True
                    _kill(state, name, rank, out)
        case ClearRun():
            run.removing = True
            out.append(RemoveRun(name))
        case AcceptRun():
            pass  # It was.


def _signal(name: str, local: LocalRank, number: int, out: Effects) -> None:
    local.asked = True
    if local.phase == "waiting":
        _ended(name, local, Exited(local.rank, WaitStatus(signal=number)), out)
    elif local.phase == "asked":
        local.signal = number
    elif local.phase == "running":
        out.append(SendSignal(name, local.rank, number))


def _start_waiting(state: HostState, now: float, out: Effects) -> None:
    """Start the ranks that wait, as far as there is somebody to start them."""
    for name, run in state.runs.items():
        _start_those(state, name, run.ranks.values(), now, out)


def _start_those(state: HostState, name: str, ranks: Iterable[LocalRank], now: float, out: Effects) -> None:
    run = state.runs[name]
    waiting = [local for local in ranks if local.phase == "waiting"]
    run.held = run.held or bool(waiting and run.killing)
    if not waiting or run.killing or run.failed or (run.key and want_zygote(state, name, run, now, out) is None):
        return
    for local in waiting:
        local.phase = "asked"
    first, chosen = waiting[0], tuple(local.rank for local in waiting)
    devices = {local.rank.index: local.device for local in waiting if local.device}
    out.append(ForkRanks(run.key, name, chosen, first.port, run.view, first.address, devices))


def _ask_again(state: HostState, key: str, process: ProcessId | None) -> None:
    """A zygote or the warden is back. Ask it again for its ranks: it reports those that it started already."""
    zygote = state.zygotes.get(key)
    if key and (zygote is None or zygote.process != process or zygote.phase != "ready"):
        return
    for _, local in _asked(state, key):
        local.phase = "waiting"


def _forget_asked(state: HostState, key: str, out: Effects) -> None:
    """A zygote or the warden is gone. The ranks that it was asked for wait for another one."""
    for name, local in _asked(state, key):
        _kill(state, name, local.rank, out)  # H3
        local.phase = "waiting"
        if local.doomed or local.signal:
            _ended(name, local, Exited(local.rank, WaitStatus(signal=local.signal or 9)), out)


def _environment_lost(state: HostState, name: str, reason: str, out: Effects) -> None:
    """None of a run's ranks can be started here any more."""
    if name in state.runs and not state.runs[name].failed:
        state.runs[name].failed = True
        for _, local in _asked(state, state.runs[name].key, name):
            local.phase = "waiting"
        out.append(ToRun(name, HostFailed(reason)))


def _asked(state: HostState, key: str, only: str = "") -> list[tuple[str, LocalRank]]:
    runs = [(name, run) for name, run in state.runs.items() if run.key == key and only in ("", name)]
    return [(name, local) for name, run in runs for local in run.ranks.values() if local.phase == "asked"]


def _store(state: HostState, event: StoreListens | StoreForked | StoreEnded, out: Effects) -> None:
    """Keep a store for the ranks of the generation that was asked for last."""
    run = state.runs.get(event.run)
    if run is None:
        return
    generation, store = event.generation, run.store
    match event:
        case StoreListens(port=port, reason=reason, address=address):
            if run.listening != generation:
                return
            run.listening = None
            if not reason:
                run.store = TorchStore(generation, port)
                out.append(ToRun(event.run, StoreOpened(generation, port, address)))
            elif store is None:
                out.append(ToRun(event.run, StoreFailed(generation, reason)))
            else:
                out.append(TellUser(event.run, f"torch's store ended and cannot be replaced: {reason}"))
        case StoreForked(process=process):
            if store is not None and store.generation == generation:
                store.process = process
        case StoreEnded():
            if store is not None and store.generation == generation and not run.removing and run.listening is None:
                store.process, run.listening = None, generation
                out.append(ListenFor(event.run, generation, store.port))


# --- children


def _child(
    state: HostState,
    event: ChildForked | ChildRefused | ChildEnded | ChildSilent | PageRead,
    now: float,
    out: Effects,
) -> None:
    run = state.runs.get(event.run)
    local = None if run is None else run.ranks.get(event.rank.index)
    if local is None or local.rank != event.rank or local.phase == "ended":
        if isinstance(event, ChildForked):
            _kill(state, event.run, event.rank, out)  # H2
        return
    match event:
        case ChildForked(process=process):
            _forked(state, event.run, local, process, now, out)
        case ChildRefused():
            if local.phase == "asked":
                _kill(state, event.run, local.rank, out)  # H3: asked for twice, it was refused once.
                _ended(event.run, local, Exited(local.rank, WaitStatus(code=127)), out)
        case ChildEnded(status=status):
            lived_s = now - local.started_at if local.process is not None else 0.0
            exited = Exited(local.rank, status, lived_s, event.oom, event.cpu_s, event.max_rss_bytes, event.device)
            _ended(event.run, local, exited, out)
        case ChildSilent():
            local.dead_at = now
            out.append(HostWakeAt(now + REPORT_S))
        case PageRead():
            noted = (event.flags, min(event.steps, 2), event.collectives)
            if noted != local.noted:
                local.noted = noted
                out.append(ToRun(event.run, Noted(local.rank, *noted)))


def _forked(state: HostState, name: str, local: LocalRank, process: ProcessId, now: float, out: Effects) -> None:
    if local.phase == "running":
        if local.process != process:  # H2: two starters made one each.
            _kill(state, name, local.rank, out)
        return
    local.phase, local.process, local.started_at = "running", process, now
    out.append(ToRun(name, Started(local.rank, process.pid)))
    if local.doomed:
        _kill(state, name, local.rank, out)
    elif local.signal:
        out.append(SendSignal(name, local.rank, local.signal))  # H4


def _kill(state: HostState, name: str, rank: RankId, out: Effects) -> None:
    if name in state.runs:
        state.runs[name].killing.add(rank)
    out.append(KillTree(name, rank))


def _tree_killed(state: HostState, name: str, rank: RankId, now: float, out: Effects) -> None:
    run = state.runs.get(name)
    if run is None:
        return
    run.killing.discard(rank)
    if run.held and not run.killing:
        run.held = False
        _start_those(state, name, run.ranks.values(), now, out)


def _ended(name: str, local: LocalRank, exited: Exited, out: Effects) -> None:
    """Report the end of a rank (H1)."""
    local.phase, local.process, local.dead_at = "ended", None, None
    out.append(ToRun(name, exited))


def _ask_kernel_if_late(name: str, local: LocalRank, now: float, out: Effects) -> None:
    if local.dead_at is None or local.phase == "ended":
        return
    if now >= local.dead_at + REPORT_S:
        local.dead_at = now
        out.append(AskKernel(name, local.rank))
    out.append(HostWakeAt(local.dead_at + REPORT_S))


def _those(run: LocalRun, ranks: tuple[RankId, ...]) -> list[LocalRank]:
    found = (run.ranks.get(rank.index) for rank in ranks)
    return [local for local, rank in zip(found, ranks, strict=True) if local is not None and local.rank == rank]
