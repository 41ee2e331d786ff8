"""Explain a run on one screen: what failed first, what was seen, what was restarted, what to do next. Pure.

`explain` chooses what matters, `sections` puts it into rows; the caller reads files and clocks, and writes.
"""

import os
import shlex
import time
from collections.abc import Sequence
from itertools import takewhile
from signal import SIGKILL
from typing import Literal, NamedTuple

import msgspec

from argosy.control import (
    AnyFact,
    DeviceExcluded,
    DiskTrouble,
    GaveUp,
    HangEnded,
    HangSeen,
    HostLost,
    IncidentTaken,
    LaunchEnded,
    LaunchStarted,
    RankExited,
    RankPaused,
    Restarting,
    StopAsked,
)
from argosy.core import format_ranks
from argosy.supervise.evidence.frames import place_in
from argosy.supervise.evidence.incident import Incident, StackGroup

EXCEPTION_LINES, LOG_LINES, STACK_GROUPS, HISTORY_LINES = 7, 4, 3, 6
"""Forty lines at most, all together: one screen."""

Verdict = Literal["healthy", "running", "done", "stopped", "crash", "hang", "failed"]
"""`running`: it is alive, and no steps were seen that would show whether it is healthy."""


class RunView(msgspec.Struct, frozen=True, kw_only=True):
    """A run as its directory and its agent show it; `argv` is the command line that started it."""

    name: str
    directory: str
    argv: list[str]
    cwd: str = ""
    named: bool = True
    """The command line names the directory: the same command finds it again."""
    resumes: bool = False
    """`argosy.Run` owns the step loop, or there is a checkpoint: the next launch continues."""
    state: Literal["running", "ended", "lost"]
    """`lost`: no daemon lived to see its end."""
    supervised: bool = True
    """False between the death of an agent and the next one."""
    size: int
    started_at: float
    now: float
    code: int | None = None
    steps: tuple[int, int] | None = None
    """The fewest and the most steps among the ranks."""
    durable_step: int | None = None


class Event(msgspec.Struct, frozen=True):
    """Something that happened, in a few words."""

    at: float
    what: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `argosy why` says."""

    name: str
    summary: str
    verdict: Verdict
    at: float | None = None
    host: str = ""
    headline: str = ""
    exception: list[str] = []
    log: list[str] = []
    stacks: list[StackGroup] = []
    followers: list[int] = []
    notes: list[str] = []
    history: list[Event] = []
    durable_step: int | None = None
    commands: dict[str, str] = {}


def explain(run: RunView, facts: Sequence[AnyFact], incidents: Sequence[Incident]) -> Report:
    """Say how the run fares, or what ended its latest launch."""
    latest = max((fact.launch for fact in facts if isinstance(fact, LaunchStarted)), default=0)
    of_launch = _facts_of(latest, facts)
    incident = _decisive(run, of_launch, [i for i in incidents if i.launch == latest])
    failure = _failure(of_launch) if incident is None else None
    verdict = _verdict(run, of_launch, incident)
    rank = incident.first.index if incident and incident.first else failure.rank.index if failure else None
    return Report(
        name=run.name,
        summary=_summary(run, of_launch, verdict),
        verdict=verdict,
        at=incident.at if incident else failure.at if failure else None,
        host=incident.host if incident else _host(of_launch),
        headline=incident.headline if incident else _exit_text(failure) if failure else "",
        exception=incident.exception.splitlines() if incident else [],
        log=incident.log_tails.get(rank, []) if incident and rank is not None else [],
        stacks=incident.stacks if incident else [],
        followers=incident.followers if incident else [],
        notes=[*(incident.notes if incident else []), *_ended_well(run, of_launch)],
        history=_history(facts),
        durable_step=run.durable_step,
        commands=_commands(run, incident, rank, verdict),
    )


class Section(NamedTuple):
    """Rows of equal length below a title, which may be empty."""

    title: str
    rows: list[tuple[str, ...]]


def sections(report: Report) -> list[Section]:
    """The report as tables, the most important first; the last one holds commands to copy."""
    found = [Section(f"{report.name}: {report.summary}", [])]
    lines: list[str] = []
    if report.headline:
        what = "hang: " if report.verdict == "hang" else ""
        where = f" on {report.host}" if report.host else ""
        lines = [f"{_clock(report.at)} {what}{report.headline}{where}"]
        lines += [f"  {line}" for line in _ends(own_frames(report.exception), EXCEPTION_LINES)]
    if report.followers:
        lines.append(f"  rank{'s' * (len(report.followers) > 1)} {format_ranks(report.followers)} failed after it")
    lines += [f"  {note}" for note in [*report.notes[:2], *report.notes[2:][-1:]]]
    if lines:
        found.append(Section("", [(line,) for line in lines]))
    if report.log:
        found.append(Section("last log lines", [(line,) for line in report.log[-LOG_LINES:]]))
    if report.stacks:
        rows = [_stack_row(group) for group in report.stacks[:STACK_GROUPS]]
        more = len(report.stacks) - STACK_GROUPS
        found.append(Section("where the ranks were", rows + [("...", f"{more} more groups")] * (more > 0)))
    if report.history:
        shown = _first_and_last(report.history, HISTORY_LINES)
        found.append(Section("what happened", [(_clock(event.at), event.what) for event in shown]))
    saved = [("saved", f"step {report.durable_step}")] if report.durable_step is not None else []
    return [*found, Section("", [*saved, *report.commands.items()])]


def _facts_of(launch: int, facts: Sequence[AnyFact]) -> list[AnyFact]:
    for number, fact in enumerate(facts):
        if isinstance(fact, LaunchStarted) and fact.launch == launch:
            return list(facts[number:])
    return list(facts)


def _decisive(run: RunView, facts: Sequence[AnyFact], incidents: Sequence[Incident]) -> Incident | None:
    """The incident that explains the present state: the one after the last restart, else the last."""
    if run.state == "ended" and run.code == 0:
        return None
    newest_hang = max((i.at for i in incidents if i.kind == "hang"), default=0.0)
    incidents = [i for i in incidents if i.kind != "hang" or (i.at == newest_hang and i.recovered_after_s is None)]
    restarted_at = max((fact.at for fact in facts if isinstance(fact, Restarting)), default=0.0)
    since = sorted((i for i in incidents if i.at > restarted_at), key=lambda i: i.at)
    if run.state == "running":  # what a restart has healed is history
        return since[-1] if since else None
    crashes = [incident for incident in since if incident.kind == "crash"]
    healed = [] if _stop_of(facts) is not None else sorted(incidents, key=lambda i: i.at)[-1:]
    return (crashes or since or healed or [None])[0]


def _stop_of(facts: Sequence[AnyFact]) -> StopAsked | None:
    """The first request to stop the launch."""
    return next((fact for fact in facts if isinstance(fact, StopAsked)), None)


def _failure(facts: Sequence[AnyFact]) -> RankExited | None:
    """The first failed exit after the last restart, for when no incident could be written."""
    restarts = [number for number, fact in enumerate(facts) if isinstance(fact, Restarting)]
    exits = [fact for fact in facts[restarts[-1] if restarts else 0 :] if isinstance(fact, RankExited)]
    return next((exit for exit in exits if not exit.asked and not exit.status.ok), None)


def _verdict(run: RunView, facts: Sequence[AnyFact], incident: Incident | None) -> Verdict:
    if run.state == "ended" and run.code == 0:
        return "done"
    if incident is not None and incident.kind != "stop":
        return incident.kind
    if _stop_of(facts) is not None:
        return "stopped"
    if run.state == "running" and _failure(facts) is None:
        return "healthy" if run.steps else "running"
    return "failed"


def _summary(run: RunView, facts: Sequence[AnyFact], verdict: Verdict) -> str:
    restarts = sum(isinstance(fact, Restarting) for fact in facts)
    again = f", {restarts} restart{'s' * (restarts > 1)}" if restarts else ""
    ended = next((fact for fact in reversed(facts) if isinstance(fact, LaunchEnded)), None)
    begun = next((fact.at for fact in facts if isinstance(fact, LaunchStarted)), run.started_at)
    lasted = _duration((ended.at if ended and run.state == "ended" else run.now) - begun)
    ranks = f"{run.size} rank{'s' * (run.size > 1)}"
    if run.state == "running":
        low, high = run.steps or (0, 0)
        at = "no steps seen" if not run.steps else f"step {high}" if low == high else f"steps {low}-{high}"
        state = {"hang": "hung", "crash": "running after a failure", "stopped": "stopping"}.get(verdict, "running")
        if stopped := _stopped(facts):
            state += f", rank{'s' * (len(stopped) > 1)} {format_ranks(stopped)} stopped by a signal"
        between = "" if run.supervised else "; its supervisor is being replaced"
        return f"{state}: {ranks}, {at}, {lasted}{again}{between}"
    if run.state == "lost":
        return f"lost: {ranks}{again}; its end was not seen: Argosy's daemons were killed, or the machine restarted"
    stop = _stop_of(facts)
    how = f"stopped by {stop.by}" if stop and verdict in ("stopped", "hang") else "ended"
    how = {"hang": f"hung, then {how}", "done": "finished", "crash": "failed", "failed": "failed"}.get(verdict, how)
    code = "" if run.code is None else f" (exit code {run.code})"
    return f"{how} after {lasted}{code}: {ranks}{again}"


def _history(facts: Sequence[AnyFact]) -> list[Event]:
    """What changed the run's course; of the failed exits only the first after each restart."""
    events: list[Event] = []
    fell: int | None = None
    restarted, told = False, set[str]()  # `told`: reasons for the end of a launch that are events already.
    for fact in facts:
        if isinstance(fact, RankExited):
            told.add(f"rank {fact.rank.index}: {fact.device or fact.oom or fact.status}")
        match fact:
            case LaunchStarted(launch=launch, size=size):
                fell, restarted = None, False
                events.append(Event(fact.at, f"launch {launch}: {size} rank{'s' * (size > 1)}"))
            case RankExited(asked=False) if not fact.status.ok and (fell is None or restarted):
                fell, restarted = len(events), False
                events.append(Event(fact.at, _exit_text(fact)))
            case IncidentTaken(headline=headline) if fell is not None:  # It knows better than the order of exits.
                events[fell] = Event(events[fell].at, headline)
            case IncidentTaken(headline=headline):
                told.add(headline)
                events.append(Event(fact.at, headline))
            case Restarting(ranks=ranks, generation=generation):
                restarted = True
                which = f"rank{'s' * (len(ranks) > 1)} {format_ranks(ranks)}"
                events.append(Event(fact.at, f"{which} restarted (generation {generation})"))
            case RankPaused(resumed=resumed):
                word = "continued" if resumed else "stopped by a signal"
                events.append(Event(fact.at, f"rank {fact.rank.index} {word}"))
            case HostLost() | DeviceExcluded():
                events.append(Event(fact.at, fact.text))
            case HangSeen(summary=summary):
                events.append(Event(fact.at, f"hang: {summary}"))
            case HangEnded(lasted_s=lasted_s):
                events.append(Event(fact.at, f"hung for {_duration(lasted_s)}, then resumed"))
            case GaveUp(reason=reason):
                events.append(Event(fact.at, f"not restarted: {reason}"))
            case StopAsked(by=by):
                told.add(f"stopped by {by}")
                events += [Event(fact.at, f"stop requested by {by}"), *_killed_after(fact, facts)]
            case DiskTrouble(what=what):
                events.append(Event(fact.at, what))
            case LaunchEnded(code=code, reason=reason):
                why = "" if code == 0 or reason in told else f": {reason}"
                events.append(Event(fact.at, f"ended with exit code {code}{why}"))
            case _:
                pass
    return events


def _killed_after(stop: StopAsked, facts: Sequence[AnyFact]) -> list[Event]:
    """The ranks that SIGKILL ended after a request to stop: it came from outside, or because the grace was over."""
    until_next = takewhile(lambda fact: not isinstance(fact, StopAsked | LaunchStarted), facts[facts.index(stop) + 1 :])
    exits = [fact for fact in until_next if isinstance(fact, RankExited)]
    killed = {fact.rank.index: fact.at for fact in exits if fact.asked and fact.status.signal == SIGKILL}
    which = f"rank{'s' * (len(killed) > 1)} {format_ranks(killed)} killed by SIGKILL"
    return [Event(min(killed.values()), which)] if killed else []


def _stopped(facts: Sequence[AnyFact]) -> set[int]:
    """The ranks that were stopped (SIGSTOP and its kin) and were not continued."""
    stopped: set[int] = set()
    for fact in facts:
        match fact:
            case RankPaused(rank=rank, resumed=resumed):
                (stopped.discard if resumed else stopped.add)(rank.index)
            case RankExited(rank=rank):
                stopped.discard(rank.index)
            case _:
                pass
    return stopped


def _ended_well(run: RunView, facts: Sequence[AnyFact]) -> list[str]:
    """The ranks that ended well while others did not: what those may wait for."""
    if run.code == 0:
        return []
    done: set[int] = set()
    for fact in facts:
        match fact:
            case Restarting(ranks=ranks):
                done -= {*ranks}
            case RankExited(asked=False) if fact.status.ok:
                done.add(fact.rank.index)
            case _:
                pass
    return [f"rank{'s' * (len(done) > 1)} {format_ranks(done)} ended with exit code 0"] if done else []


def _exit_text(fact: RankExited) -> str:
    why = f": {fact.device}" if fact.device else f": out of memory: {fact.oom}" if fact.oom else ""
    return f"rank {fact.rank.index} failed: {fact.status}{why}"


def _host(facts: Sequence[AnyFact]) -> str:
    return next((fact.host for fact in facts if isinstance(fact, LaunchStarted)), "")


def _commands(run: RunView, incident: Incident | None, rank: int | None, verdict: str) -> dict[str, str]:
    name = shlex.quote(run.name)
    commands: dict[str, str] = {}
    if run.state != "running" and verdict != "done":
        argv = list(run.argv)
        if run.resumes and not run.named:
            argv[2:2] = ["--dir", os.path.relpath(run.directory, run.cwd) if run.cwd else run.directory]
        commands["resume" if run.resumes else "rerun"] = shlex.join(argv)
    commands["logs"] = f"argosy logs {name}" + (f" --rank {rank}" if rank is not None else "")
    if incident is not None and incident.stacks:
        commands["stacks"] = f"less {shlex.quote(f'{run.directory}/incidents/{incident.id}/stacks.txt')}"
    elif run.state == "running":
        commands["stacks"] = f"argosy stacks {name}"
    if run.state == "running" and verdict == "hang":
        commands["native"] = f"argosy stacks --native {name}"
        commands["stop"] = f"argosy stop {name}"
    return commands


def _stack_row(group: StackGroup) -> tuple[str, str]:
    who = f"rank{'s' * (len(group.ranks) > 1)} {format_ranks(group.ranks)}"
    where = place_in(group.frames)
    if not any(frame.is_users for frame in group.frames):
        where = where and f"outside the script: {where}"
    elif not group.frames[0].is_users:
        where += f" ({group.frames[0].function})"
    return who, "; ".join(filter(None, [where, group.note]))


def own_frames(lines: Sequence[str]) -> list[str]:
    """A traceback without the frames of installed packages, and without marks under lines."""
    kept: list[str] = []
    foreign = False
    for line in lines:
        if line.startswith('  File "'):
            foreign = "/site-packages/" in line or "/lib/python3" in line
        elif not line.startswith("    "):
            foreign = False
        if not foreign and not (line.startswith("    ") and set(line) <= set(" ^~")):
            kept.append(line)
    return kept


def _ends(lines: Sequence[str], most: int) -> list[str]:
    """The last lines, with a mark where the beginning is missing."""
    return list(lines) if len(lines) <= most else ["...", *lines[-(most - 1) :]]


def _first_and_last(events: Sequence[Event], most: int) -> list[Event]:
    """The beginning matters (what failed first) and the end does; the middle is counted."""
    if len(events) <= most:
        return list(events)
    head, tail = events[:3], events[-(most - 4) :]
    return [*head, Event(head[-1].at, f"... {len(events) - most + 1} more ..."), *tail]


def _clock(at: float | None) -> str:
    return time.strftime("%m-%d %H:%M:%S", time.localtime(at))


def _duration(seconds: float) -> str:
    minutes, left = divmod(int(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {left} s" if minutes else f"{left} s"
