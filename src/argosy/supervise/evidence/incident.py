"""An incident: a failure with its evidence, written before anything is killed.

`incidents/<id>/` holds `stacks.txt` in full and then `incident.json`: who finds the second finds the first.
No environment, no argument of a process is ever part of it: either may hold secrets.
"""

import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from argosy.core import RankId, WaitStatus, format_ranks
from argosy.supervise.evidence.frames import Frame, Stack, group_stacks, stacks_text
from argosy.supervise.evidence.log_excerpt import exception_line, last_lines, last_traceback, without_prefix
from argosy.supervise.records.rundir import write_atomically

TAIL_LINES = 20
FRAMES_KEPT = 12


class Exit(msgspec.Struct, frozen=True, kw_only=True):
    """How a rank ended and what it left; `exception` if it wrote an error file, else its log is searched."""

    rank: RankId
    status: WaitStatus
    at: float = 0.0
    asked: bool = False
    oom: str = ""
    device: str = ""
    log_tail: str = ""
    exception: str = ""


class StackGroup(msgspec.Struct, frozen=True):
    """Ranks that were at the same lines; the innermost frames first."""

    ranks: list[int]
    source: str
    frames: list[Frame]
    note: str = ""


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """What happened and what was seen then; times are seconds since the epoch."""

    id: str
    at: float
    kind: Literal["crash", "hang", "stop"]
    host: str
    launch: int
    headline: str
    first: RankId | None = None
    cause: str = ""
    exception: str = ""
    log_tails: dict[int, list[str]] = {}
    stacks: list[StackGroup] = []
    followers: list[int] = []
    notes: list[str] = []
    recovered_after_s: float | None = None
    """A hang that ended by itself: how long the ranks stood still."""


class RankFailure(msgspec.Struct, frozen=True):
    """Who failed first, and who only because of that."""

    first: Exit
    cause: str
    exception: str
    followers: tuple[Exit, ...] = ()
    others: tuple[Exit, ...] = ()
    early: tuple[Exit, ...] = ()
    """Those that ended with 0 while the failed ones still waited for somebody."""


_FOLLOWING = (
    *("Connection closed by peer", "Connection reset by peer", "Connection refused", "Broken pipe"),
    *("recvValue failed", "sendBytes failed", "failed to recv, got 0 bytes", "The client socket has timed out"),
    *("DistBackendError", "DistNetworkError", "DistStoreError", "[gloo/", "/gloo/transport/"),
    *("NCCL communicator was aborted", "NCCL error", "ncclRemoteError"),
    *("Watchdog caught collective operation timeout", "Timed out waiting", "PeerLost", "is lost:"),
)


def first_failure(exits: Sequence[Exit]) -> RankFailure | None:
    """Say who failed first among exits in the reaper's order; None if nobody failed.

    A rank that lost its peer often dies before the one that it lost: Python needs longer to print a traceback
    and leave than a socket to break. So an exit that speaks of a lost connection yields to a later one that
    has a reason of its own, as long as there is one.
    """
    failed = [exit for exit in exits if not exit.status.ok and not exit.asked]
    if not failed:
        return None
    own = [exit for exit in failed if not is_follower(exit)]
    # The culprit may still have been printing its traceback when it was told to stop.
    late = [exit for exit in exits if exit.asked and exit.status.code and exception_of(exit)]
    first = [*own, *(exit for exit in late if not is_follower(exit)), *failed][0]
    rest = [exit for exit in exits if exit is not first and not exit.status.ok]
    following = tuple(exit for exit in rest if exit.asked or is_follower(exit))
    before = exits[: exits.index(first)] if is_follower(first) else ()
    return RankFailure(
        first=first,
        cause=cause_of(first),
        exception=exception_of(first),
        followers=following,
        others=tuple(exit for exit in rest if exit not in following),
        early=tuple(exit for exit in before if exit.status.ok and not exit.asked),
    )


def is_follower(exit: Exit) -> bool:
    """Whether the exit says no more than that somebody else was gone."""
    if exit.oom or exit.device or exit.status.signal not in (None, signal.SIGABRT):
        return False
    if exit.status.signal:  # NCCL's watchdog aborts; what it says may be followed by a long native stack
        text = exit.log_tail
    else:
        text = exception_line(exception_of(exit)) or "\n".join(last_lines(exit.log_tail, 3))
    return is_connection_error(text)


def is_connection_error(text: str) -> bool:
    """Whether a message says no more than that another rank was gone."""
    return any(mark in text for mark in _FOLLOWING)


def exception_of(exit: Exit) -> str:
    """The traceback that ended the rank, "" if it left none."""
    return exit.exception or last_traceback(exit.log_tail)


def cause_of(exit: Exit) -> str:
    """One line: the device, the exception, the signal, the memory, or the bare code."""
    if exit.device:
        words = exception_line(exception_of(exit)) if exit.device.endswith(" failed") else ""
        return f"{exit.device}{f': {words}' if words else ''} ({exit.status})"
    if exit.oom:
        return f"{exit.status}: out of memory: {exit.oom}"
    if exit.status.signal is not None:
        return str(exit.status)
    raised = exception_line(exception_of(exit))
    return f"{raised} ({exit.status})" if raised else str(exit.status)


def crash_incident(
    failure: RankFailure, stacks: Mapping[int, Stack], *, host: str, launch: int, notes: Sequence[str] = ()
) -> Incident:
    """Put together what a crash left: the first failed rank, and where the others were."""
    first, headline = failure.first, f"rank {failure.first.rank.index} failed: {failure.cause}"
    followers = failure.followers
    if failure.early:
        ranks = format_ranks(exit.rank.index for exit in failure.early)
        many = "s" * (len(failure.early) > 1)
        before = "init_process_group" if "in init_process_group" in failure.exception else "the others were done"
        headline = f"rank{many} {ranks} ended with exit code 0 before {before}; then {headline}"
        first, followers = failure.early[0], (failure.first, *failure.followers)
    tails = {exit.rank.index: _tail(exit) for exit in (first, failure.first, *failure.others)}
    return Incident(
        id=incident_id(first.at, "crash", first.rank),
        at=first.at,
        kind="crash",
        host=host,
        launch=launch,
        headline=headline,
        first=first.rank,
        cause=failure.cause,
        exception=failure.exception,
        log_tails={index: lines for index, lines in tails.items() if lines},
        stacks=summarise(stacks),
        followers=sorted(exit.rank.index for exit in followers),
        notes=list(notes),
    )


def _tail(exit: Exit) -> list[str]:
    """The last lines besides the traceback, which is kept apart and would crowd out all others."""
    raised = {line.strip() for line in exception_of(exit).splitlines()}
    lines = last_lines(exit.log_tail, sys.maxsize)
    return [line for line in lines if without_prefix(line).strip() not in raised | {""}][-TAIL_LINES:]


def incident_id(at: float, kind: str, rank: RankId | None) -> str:
    """A name that sorts by time and is unique within a run."""
    who = f"-{rank.index}.{rank.generation}" if rank else ""
    return f"{int(at * 1000):013d}-{kind}{who}"


def summarise(stacks: Mapping[int, Stack]) -> list[StackGroup]:
    """The groups of equal stacks, shortened for reading; `stacks.txt` keeps all."""
    groups: list[StackGroup] = []
    for ranks, stack in group_stacks(stacks):
        stopped = stack.proc is not None and stack.proc.state in "TtD"
        note = "; ".join(filter(None, [stack.note, str(stack.proc) if stopped else ""]))
        groups.append(StackGroup(ranks, stack.source, list(stack.frames[:FRAMES_KEPT]), note))
    return groups


def write_incident(directory: Path, incident: Incident, stacks: Mapping[int, Stack] | None) -> Path:
    """Write `directory/<id>/`, whole or not at all; returns it. Without `stacks`, those on disk stay.

    Raises:
        OSError: no room or no permission; nothing that looks complete is left.
    """
    target = directory / incident.id
    target.mkdir(parents=True, exist_ok=True)
    if stacks is not None:
        write_atomically(target / "stacks.txt", stacks_text(stacks).encode(), sync=True)
    text = msgspec.json.format(msgspec.json.encode(incident), indent=1)
    write_atomically(target / "incident.json", text, sync=True)
    return target


def read_incidents(run_directory: Path) -> list[Incident]:
    """All incidents of a run in the order of time; what cannot be read is skipped."""
    found: list[Incident] = []
    for path in sorted((run_directory / "incidents").glob("*/incident.json")):
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=Incident))
        except (OSError, msgspec.DecodeError):
            continue
    return sorted(found, key=lambda incident: incident.at)
