"""Decide about a host's zygotes: when one is started, what it imports, when ranks are executed instead.

Z1  One zygote per key; it is started when a rank waits for it.
Z2  What spoils a zygote is left out by the next one. After `TRIES_MAX` tries, or if torch itself spoils it, ranks are
    executed.
Z3  At most `WARM_MAX` zygotes are kept that no run uses.
"""

from collections.abc import Collection, Sequence

from argosy.control.host_events import (
    HostEffect,
    ImportIn,
    RememberSpoiled,
    RetireZygote,
    SpawnZygote,
    TellUser,
    ZygoteCame,
    ZygoteLoaded,
    ZygoteLost,
)
from argosy.control.host_state import HostState, LocalRun, LocalZygote
from argosy.control.launch import OF_TORCH, TORCH, imports_id

WARM_MAX = 4
TRIES_MAX = 4
RETURN_S = 2.0
"""How long zygotes of an earlier agent have to connect."""


def without(entries: Sequence[str], left_out: Collection[str]) -> tuple[str, ...]:
    """Return `entries` without those left out, their submodules and their names; torch stays."""
    gone = tuple(f"{entry}{mark}" for entry in left_out for mark in (".", ":"))
    kept = tuple(entry for entry in entries if entry not in left_out and not entry.startswith(gone))
    if "torch" in entries and len(kept) < len(entries) and not OF_TORCH & set(left_out):
        kept = (*TORCH, *(entry for entry in kept if entry not in TORCH))
    return kept


def zygote_for(state: HostState, key: str) -> str:
    """The key of the zygote that serves a launch: its own, or that of one which reads none of what differs."""
    found = (name for name, zygote in state.zygotes.items() if zygote.phase == "ready" and zygote.shared_key == key)
    return next(found, key)


def want_zygote(state: HostState, name: str, run: LocalRun, now: float, out: list[HostEffect]) -> LocalZygote | None:
    """Return the zygote of a run if it can fork; else see to it that one comes."""
    zygote = state.zygotes.get(run.key)
    if zygote is None:
        state.zygotes[run.key] = LocalZygote(run.launch, used_at=now)
        out.append(SpawnZygote(run.key, name))
        return None
    zygote.used_at = now
    return zygote if zygote.phase == "ready" else None


def spawn_again(state: HostState, out: list[HostEffect]) -> None:
    """Another warden is there: ask it for the zygotes that the one before may not have executed."""
    for key, zygote in list(state.zygotes.items()):
        if zygote.process is None:
            _spawn(state, key, zygote, out)


def _spawn(state: HostState, key: str, zygote: LocalZygote, out: list[HostEffect]) -> None:
    """Execute a zygote for a run that needs it; without one it is not needed."""
    wanted = next((name for name, run in state.runs.items() if run.key == key), None)
    if wanted is None:
        state.zygotes.pop(key, None)
    else:
        zygote.launch = state.runs[wanted].launch
        state.zygotes[key] = zygote
        out.append(SpawnZygote(key, wanted))


def zygote_came(state: HostState, event: ZygoteCame, out: list[HostEffect]) -> None:
    """Take a zygote that connected, or let it go: another one serves its key, or nobody needs it."""
    zygote = state.zygotes.get(event.key)
    if zygote is None and event.ready:
        zygote = state.zygotes[event.key] = LocalZygote(None)
    if zygote is None or zygote.process not in (None, event.process) or not (event.ready or zygote.launch):
        out.append(RetireZygote(event.process))
        return
    zygote.process, zygote.shared_key = event.process, event.shared_key
    zygote.phase = "ready" if event.ready else "importing"
    if zygote.launch is not None and not event.ready:
        zygote.left_out = [*zygote.left_out, *event.left_out]
        entries = without(zygote.launch.preload, zygote.left_out)
        out.append(ImportIn(event.process, entries, imports_id(zygote.launch)))


def zygote_loaded(state: HostState, event: ZygoteLoaded, out: list[HostEffect]) -> None:
    """Use a zygote that has imported everything, or start a fresh one without what spoiled it (Z2)."""
    zygote = state.zygotes.get(event.key)
    if zygote is None or zygote.process != event.process:
        return
    if not event.spoiled:
        zygote.phase, zygote.shared_key = "ready", event.shared_key
        return
    if zygote.launch is not None:
        out.append(RememberSpoiled(zygote.launch.fingerprint, event.spoiled))
    out.append(RetireZygote(event.process))
    for entry, reason in event.spoiled:
        _notice(state, event.key, f"{entry} is imported by each rank, not once for all: {reason}", out)
    hopeless = next((reason for entry, reason in event.spoiled if entry in OF_TORCH), "")
    _again(state, event.key, [entry for entry, _ in event.spoiled], hopeless, out)


def zygote_lost(state: HostState, event: ZygoteLost, out: list[HostEffect]) -> None:
    """Forget a zygote that ended; one that died while it imported is tried again without what it imported last."""
    zygote = state.zygotes.get(event.key)
    if zygote is None or zygote.process != event.process:
        return
    if zygote.phase in ("ready", "returning") or not _is_wanted(state, event.key):
        del state.zygotes[event.key]
        return
    _notice(state, event.key, f"the zygote died while importing {event.importing or 'nothing yet'}", out)
    hopeless = "importing torch killed the zygote" if event.importing in OF_TORCH else ""
    _again(state, event.key, [event.importing], hopeless, out)


def give_up_zygote(state: HostState, key: str, reason: str, out: list[HostEffect]) -> None:
    """Ranks of this key are executed from now on, each with its own imports."""
    _notice(state, key, f"ranks start cold, each with its own imports: {reason}", out)
    state.zygotes.pop(key, None)
    for run in state.runs.values():
        if run.key == key:
            run.key = ""


def trim_zygotes(state: HostState, out: list[HostEffect]) -> None:
    """Let the longest unused zygotes go beyond the bound (Z3)."""
    in_use = {run.key for run in state.runs.values()}
    idle = [key for key, zygote in state.zygotes.items() if zygote.phase == "ready" and key not in in_use]
    idle.sort(key=lambda key: state.zygotes[key].used_at)
    for key in idle[: max(0, len(state.zygotes) - WARM_MAX)]:
        process = state.zygotes.pop(key).process
        if process is not None:
            out.append(RetireZygote(process))


def _again(state: HostState, key: str, left_out: list[str], hopeless: str, out: list[HostEffect]) -> None:
    zygote = state.zygotes[key]
    if hopeless or zygote.tries >= TRIES_MAX:
        give_up_zygote(state, key, hopeless or "no zygote came up", out)
        return
    left_out = [*zygote.left_out, *left_out]
    again = LocalZygote(zygote.launch, left_out, tries=zygote.tries + 1, used_at=zygote.used_at)
    _spawn(state, key, again, out)


def _is_wanted(state: HostState, key: str) -> bool:
    return any(
        run.key == key and any(local.phase in ("waiting", "asked") for local in run.ranks.values())
        for run in state.runs.values()
    )


def _notice(state: HostState, key: str, text: str, out: list[HostEffect]) -> None:
    out.extend(TellUser(name, text) for name, run in state.runs.items() if run.key == key)
