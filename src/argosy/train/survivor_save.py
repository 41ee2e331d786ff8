"""Save the newest step while ranks are missing: one survivor writes the parts of all ranks.

V1  Of replicas a survivor has everything; the shards of lost ranks are still in their arenas.
V2  One survivor saves: the others wait for a lock, which a death releases, and find its note.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from argosy.checkpoint import list_steps, save_whole
from argosy.core import ArgosyError, PeerLost
from argosy.fabric import here
from argosy.train.arena import Arena, arena_folders
from argosy.train.checkpoint_schedule import FLUSH_S, state_of
from argosy.train.heal_decision import Version, newest
from argosy.transfer import State, Unit

if TYPE_CHECKING:
    from argosy.train.run import Run

SETTLE_S = 1.0
"""How long another survivor may take to put its shard of the newest step into its arena."""
_POLL_S = 0.01


class NotHeld(ArgosyError):
    """No survivor has some part of the state."""


def in_words(loss: BaseException | None) -> str:
    """Who was lost, and why, for a line that goes on."""
    if not isinstance(loss, PeerLost):
        return str(loss or "a rank lost")
    # Of a rank that another group lost, the cause says everything.
    peer, lost, cause = loss.cause.rpartition(" is lost: ")
    peer = peer.rpartition(": ")[2] if lost else loss.peer
    return f"{peer} lost ({cause.removeprefix('killed by ')})"


def save_without_lost(run: "Run", why: str) -> None:
    """Make the newest step durable, or report what is lost; `why` begins the line. Of several survivors one does it."""
    memory = here().memory
    if memory is None or run.healing.fresh or run.healing.torn or not run.step:
        return
    run.saves.forget()
    fd = os.open(memory / "last_save", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        if _locked(fd) and (note := f"{len(run.ledger.eras)}.{run.step}".encode()) != os.pread(fd, 64, 0):
            run.tell(f"{why}{_save(run)}")
            os.ftruncate(fd, 0)
            os.pwrite(fd, note, 0)
    finally:
        os.close(fd)


def _locked(fd: int) -> bool:
    deadline = time.monotonic() + FLUSH_S
    while time.monotonic() < deadline:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_POLL_S)
        else:
            return True
    return False


def _save(run: "Run") -> str:
    """The rest of the line: what was saved, or what is lost."""
    had, reason = run.step, ""
    durable = _newest(run)
    try:
        if durable != run.step:
            arenas = [Arena(arena_folders(), rank) for rank in range(run.size)]
            if not run.healing.replicated:
                run.healing.from_arena(_common(run, arenas))
            save_whole(run.directory, _parts(run, arenas), run.step, era=len(run.ledger.eras), say=run.tell)
            run.scribe.catch_up()
            durable = run.step
    except (ArgosyError, OSError) as error:
        reason = f" ({error})"
    if durable < had:
        steps = f"steps {durable + 1:,} to {had:,} are" if had > durable + 1 else f"step {had:,} is"
        there = f"the newest checkpoint is of step {durable:,}" if durable else "there is no checkpoint"
        return f": {steps} lost; {there}{reason}"
    return f": saved step {durable:,}; the same command resumes from there"


def _newest(run: "Run") -> int:
    """The newest durable step that a resume would take."""
    steps = [(each.era, each.step) for each in list_steps(run.directory) if not each.fault]
    return max(steps)[1] if steps else 0


def _common(run: "Run", arenas: list[Arena]) -> Version:
    """The newest version of which every rank's shard is in its arena."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        common = set[Version].intersection(*(set(arena.held()) for arena in arenas))
        if run.healing.version in common or time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    if not common:
        raise NotHeld("no step is in the arenas of all ranks")
    return newest(common)


def _parts(run: "Run", arenas: list[Arena]) -> Iterator[State]:
    """The state of each rank, rank 0's last."""
    state = state_of(run)
    if run.healing.holders:
        raise NotHeld("each rank has tensors that no other rank has")
    transient = set(run.tracked.state(run.healing.apart).units) - set(state.units)
    for rank in reversed(range(run.size)):
        if rank == run.rank:
            yield state
        elif run.healing.replicated:
            own = arenas[rank].own_of(run.step)
            yield replace(state, rank=rank, units=_with_own(state, own.tensors() if own is not None else {}))
        elif (found := arenas[rank].full(run.healing.version)) is not None:
            yield replace(found, units={n: unit for n, unit in found.units.items() if n not in transient})
        else:
            raise NotHeld(f"no survivor has the state of rank {rank}")


def _with_own(state: State, own: Mapping[str, Any]) -> dict[str, Unit]:
    """Another rank's units: its own buffers, and what is the same on all ranks."""
    units = dict(state.units)
    for name in own.keys() & units.keys():
        unit = units[name]
        members = {key: msgspec.structs.replace(each, local=own[name]) for key, each in unit.members.items()}
        units[name] = msgspec.structs.replace(unit, members=members)
    return units
