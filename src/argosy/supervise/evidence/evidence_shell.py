"""Evidence about one run: incidents when a rank fails, and the watch for hangs. The shell around the pure parts.

Nothing here blocks: `poll` is called by the agent's loop, often while stacks are being taken, else four times a second.
Logs are read and incidents are written in the background.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from argosy.control import (
    EvidenceTaken,
    HangPolicy,
    Hung,
    Launch,
    RunEvent,
    RunState,
    Suspect,
    decide_hang_end,
    facts,
)
from argosy.core import RankId
from argosy.observe import Flag, RankProgress
from argosy.supervise.background_jobs import BackgroundJobs
from argosy.supervise.evidence.frames import Stack
from argosy.supervise.evidence.hang_samples import HangWatch, Tracker
from argosy.supervise.evidence.hang_verdict import Busy, Hang, judge
from argosy.supervise.evidence.incident import (
    Exit,
    Incident,
    crash_incident,
    first_failure,
    incident_id,
    read_incidents,
    summarise,
    write_incident,
)
from argosy.supervise.evidence.log_excerpt import error_file_text, log_tail
from argosy.supervise.evidence.proc_sample import ProcSample
from argosy.supervise.evidence.stacks import StackTaking

SAMPLE_S = 0.25
FAST_S = 0.003
STACKS_S = 5.0


class Observed(Protocol):
    """The run that evidence is about, and who hears of it."""

    number: int
    launch: Launch
    directory: Path
    logs: Path
    files: Path
    jobs: BackgroundJobs

    @property
    def host(self) -> str: ...

    def host_of(self, index: int) -> str: ...

    @property
    def state(self) -> RunState: ...

    def progress(self) -> dict[int, RankProgress]: ...

    def proc_of(self, index: int) -> ProcSample | None: ...

    @property
    def is_blind(self) -> bool: ...

    def take_stacks(self, indices: Sequence[int], deadline_s: float) -> StackTaking: ...

    def tell_fact(self, fact: facts.AnyFact) -> None: ...

    def notice(self, text: str) -> None: ...

    def feed(self, event: RunEvent) -> None: ...


class Evidence:
    """What is being found out about a run."""

    def __init__(self, run: Observed) -> None:
        self._run = run
        self._tracker = Tracker()
        self._watch = HangWatch(HangPolicy(hang_after_s=run.launch.hang_after_s))
        self._exits: list[Exit] = []
        self._taking: StackTaking | None = None
        self._suspect: Suspect | None = None
        self._crash: tuple[RankId, str] | None = None
        self._hang: tuple[Hang, Incident] | None = None
        self._inherited: Incident | None = None
        """A hang that an earlier agent reported, until the first sample."""
        self._sampled_at = 0.0

    @property
    def busy(self) -> bool:
        """Whether stacks are being taken right now."""
        return self._taking is not None

    def follow(self, fact: facts.AnyFact) -> None:
        """Know who lives, and how others ended; their logs are read when an incident is written."""
        match fact:
            case facts.RankStarted(rank=rank):
                self._tracker.started(rank.index, time.monotonic())
                self._exits = [exit for exit in self._exits if exit.rank.index != rank.index]  # Of the one before.
                self._hang = None
            case facts.RankExited(rank=rank, status=status):
                self._tracker.exited(rank.index, status)
                why = {"oom": fact.oom, "device": fact.device}
                self._exits.append(Exit(rank=rank, status=status, at=fact.at, asked=fact.asked, **why))
            case _:
                pass

    def recover(self, recorded: Sequence[facts.AnyFact]) -> None:
        """Take over what an earlier agent saw; of exits those that it has written no incident about."""
        for fact in recorded:
            self.follow(fact)
            if isinstance(fact, facts.IncidentTaken):
                self._exits = [exit for exit in self._exits if exit.status.ok]
        told = [fact for fact in recorded if isinstance(fact, facts.HangSeen | facts.HangEnded | facts.RankStarted)]
        if told and isinstance(hang := told[-1], facts.HangSeen):  # It was not taken back.
            known = read_incidents(self._run.directory)
            self._inherited = next((incident for incident in known if incident.id == hang.incident), None)

    def take(self, first: RankId, cause: str) -> None:
        """Begin to take evidence of a failure; ends with the event `EvidenceTaken`."""
        self._conclude()
        self._crash = (first, cause)
        # Ranks that wait for a replacement live on: faulthandler reads the frames of threads that run, and at times
        # crashes over one. A run tells itself where its ranks were.
        own = {index for index, seen in self._run.progress().items() if seen.has(Flag.RUN_MANAGED)}
        self._taking = self._run.take_stacks([index for index in self.visible() if index not in own], STACKS_S)
        self.poll(time.monotonic())

    def poll(self, now: float) -> None:
        """Go on with what is under way; take a sample when it is time."""
        if self._taking is not None and self._taking.step(now):
            stacks = self._taking.result()
            self._taking = None
            if self._crash is not None:
                self._write_crash(stacks)
            elif self._suspect is not None:
                self._judge(self._suspect, stacks)
        if now - self._sampled_at >= SAMPLE_S and not self._run.state.ended:
            self._sampled_at = now
            self._sample(now)

    def close(self) -> None:
        """Stop whatever is under way; a failure is written down with what is known by now."""
        self._conclude()
        self._follow_hang(time.monotonic())

    def _conclude(self) -> None:
        stacks: dict[int, Stack] = {}
        if self._taking is not None:
            self._taking.close()
            stacks = self._taking.result()
        self._taking = self._suspect = None
        if self._crash is not None:
            self._write_crash(stacks)

    def visible(self) -> list[int]:
        """The ranks that can be looked into."""
        slots = self._run.state.slots
        return [index for index, slot in enumerate(slots) if slot.pid and self._run.proc_of(index) is not None]

    def _track(self, now: float) -> None:
        progress = self._run.progress()
        for index, slot in enumerate(self._run.state.slots):
            proc = self._run.proc_of(index) if slot.pid else None
            if proc is not None or (slot.pid and index in progress):
                self._tracker.update(index, progress.get(index), proc, now)

    def _sample(self, now: float) -> None:
        self._track(now)
        if self._inherited is not None:
            self._hang, self._inherited = (self._resume_hang(self._inherited, now), self._inherited), None
        if self._taking is not None or self._run.state.takedowns or self._run.is_blind:
            return
        views = self._tracker.views()
        suspect = self._watch.look(views, now)
        if suspect is not None:
            self._suspect = suspect
            self._taking = self._run.take_stacks(self.visible(), STACKS_S)
        else:
            self._follow_hang(now)

    def _judge(self, suspect: Suspect, stacks: dict[int, Stack]) -> None:
        self._suspect = None
        self._track(time.monotonic())
        if self._watch.went_on(self._tracker.views()):
            return  # it moved while its stack was being taken
        verdict = judge(suspect, stacks)
        self._watch.answer(verdict)
        if isinstance(verdict, Busy):
            return
        run = self._run
        incident = Incident(
            id=incident_id(time.time(), "hang", None),
            at=time.time(),
            kind="hang",
            host=run.host_of(verdict.culprits[0] if verdict.culprits else 0),
            launch=run.number,
            headline=verdict.headline,
            cause=verdict.kind,
            first=run.state.rank(verdict.culprits[0]) if verdict.culprits else None,
            stacks=summarise(stacks),
            notes=list(verdict.details),
        )
        self._hang = verdict, incident
        seen = facts.HangSeen(at=time.time(), summary=verdict.headline, incident=incident.id)
        self._write(lambda: incident, stacks, lambda _: run.tell_fact(seen))

    def _resume_hang(self, incident: Incident, now: float) -> Hang:
        """Follow a hang that an earlier agent reported: it ends when the ranks move from here on."""
        views = [view for view in self._tracker.views() if view.exited is None]
        self._watch.take_over(views)
        culprits = (incident.first.index,) if incident.first is not None else ()
        stuck = tuple(view.index for view in views)
        return Hang(incident.headline, incident.cause, culprits, since=now, stuck=stuck)

    def _follow_hang(self, now: float) -> None:
        """Report that a hang ended, or treat it as a failure when it lasts too long."""
        if self._hang is None:
            return
        hang, incident = self._hang
        lasted_s = max(now - hang.since, time.time() - incident.at)  # The second of one that an earlier agent reported.
        moved = hang.moved(self._tracker.views())
        end = decide_hang_end(now - lasted_s, moved, self._run.launch.hang_timeout_s, now)
        if end == "lasts":
            return
        self._hang = None
        if end == "over":
            recovered = msgspec.structs.replace(incident, recovered_after_s=lasted_s)
            ended = facts.HangEnded(at=time.time(), incident=incident.id, lasted_s=lasted_s)
            self._write(lambda: recovered, None, lambda _: self._run.tell_fact(ended))
        else:
            culprit = hang.culprits[0] if hang.culprits else 0
            self._run.feed(Hung(culprit, f"hung for {lasted_s:.0f} s"))

    def _write_crash(self, stacks: dict[int, Stack]) -> None:
        assert self._crash is not None
        first, cause = self._crash
        self._crash = None
        exits = self._exits
        self._exits = [exit for exit in exits if exit.status.ok]
        self._write(
            partial(self._crash_incident, first, cause, exits, stacks), stacks, partial(self._crash_written, first)
        )

    def _crash_incident(
        self, first: RankId, cause: str, exits: Sequence[Exit], stacks: Mapping[int, Stack]
    ) -> Incident:
        """In the background: read the logs, and put together what is known."""
        run = self._run
        failure = first_failure([_with_logs(exit, run.logs) for exit in exits])
        if failure is not None:
            return crash_incident(failure, stacks, host=run.host_of(failure.first.rank.index), launch=run.number)
        return Incident(  # A hang that is treated as a failure: nobody has exited.
            id=incident_id(time.time(), "stop", first),
            at=time.time(),
            kind="stop",
            host=run.host,
            launch=run.number,
            headline=cause,
            first=first,
            stacks=summarise(stacks),
        )

    def _crash_written(self, failed: RankId, incident: Incident | None) -> None:
        if incident is not None:
            taken = facts.IncidentTaken(
                at=time.time(),
                incident=incident.id,
                headline=incident.headline,
                failed=failed,
                first=incident.first,
            )
            self._run.tell_fact(taken)
        self._run.feed(EvidenceTaken(failed))

    def _write(
        self, make: Callable[[], Incident], stacks: Mapping[int, Stack] | None, then: Callable[[Incident | None], None]
    ) -> None:
        """Write an incident in the background, then call `then`; with None if not even `make` came to its end."""
        run = self._run

        def write() -> tuple[Incident, str]:
            incident = make()
            try:
                write_incident(run.directory / "incidents", incident, stacks)
            except OSError as error:
                return incident, error.strerror or str(error)
            return incident, ""

        def written(outcome: tuple[Incident, str] | Exception) -> None:
            incident, trouble = (None, str(outcome)) if isinstance(outcome, Exception) else outcome
            if trouble:
                run.notice(f"the evidence could not be written: {trouble}")
            then(incident)

        run.jobs.do("writing evidence", write, written)


def _with_logs(exit: Exit, logs: Path) -> Exit:
    stem = f"{exit.rank.index}.{exit.rank.generation}"
    parts = [log_tail(logs / f"{stem}.{stream}") for stream in ("out", "err")]
    return msgspec.structs.replace(
        exit,
        log_tail="\n".join(part.rstrip("\n") for part in parts if part),
        exception=error_file_text(logs / f"{stem}.error.json"),
    )
