"""Evidence about one run: incidents when a rank fails, and the watch for hangs. The shell around the pure parts.

Nothing here blocks: `poll` is called by the agent's loop, often while stacks are being taken, else four times a second.
"""

import time
from pathlib import Path
from typing import TYPE_CHECKING

from argosy.core import RankId, WaitStatus
from argosy.observe import Flag
from argosy.process.evidence.frames import Stack
from argosy.process.evidence.hang import HangPolicy, Suspect
from argosy.process.evidence.incident import (
    Exit,
    Incident,
    crash_incident,
    first_failure,
    incident_id,
    summarise,
    write_incident,
)
from argosy.process.evidence.judge import Busy, Hang, judge
from argosy.process.evidence.proc_sample import error_file_text, log_tail, read_proc
from argosy.process.evidence.stacks import Taking, Target
from argosy.process.evidence.watch import Tracker, Watch
from argosy.control import facts
from argosy.process.run import root

if TYPE_CHECKING:
    from argosy.process.host.running import Running

SAMPLE_S = 0.25
FAST_S = 0.003
EVIDENCE_S = 5.0


class Inquest:
    """What is being found out about a run."""

    def __init__(self, run: "Running") -> None:
        self._run = run
        self._tracker = Tracker()
        self._watch = Watch(HangPolicy(hang_after_s=run.launch.hang_after_s))
        self._exits: list[Exit] = []
        self._taking: Taking | None = None
        self._suspect: Suspect | None = None
        self._crash: tuple[RankId, str] | None = None
        self._hang: Hang | None = None
        self._sampled_at = 0.0

    @property
    def busy(self) -> bool:
        """Whether stacks are being taken right now."""
        return self._taking is not None

    def started(self, rank: RankId) -> None:
        """A new process is to be watched."""
        self._tracker.started(rank.index, time.monotonic())
        self._exits = [exit for exit in self._exits if exit.rank.index != rank.index]  # Of an earlier generation.
        self._hang = None

    def exited(self, rank: RankId, status: WaitStatus, oom: str) -> None:
        """A process ended; its log is read when an incident is written."""
        self._tracker.exited(rank.index, status)
        asked = self._run.state.slots[rank.index].asked
        self._exits.append(Exit(rank=rank, status=status, at=time.time(), asked=asked, oom=oom))

    def take(self, first: RankId, cause: str) -> None:
        """Begin to take evidence of a failure; ends with the event `EvidenceTaken`."""
        self._conclude()
        self._crash = (first, cause)
        # Ranks that wait for a replacement live on: faulthandler reads the frames of threads that run, and at times
        # crashes over one. A run tells itself where its ranks were.
        own = {rank.index for rank, seen in self._run.progress().items() if seen.has(Flag.RUN_MANAGED)}
        targets = [target for target in self._targets() if target.index not in own]
        self._taking = Taking(targets, time.monotonic(), deadline_s=EVIDENCE_S)
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
        if now - self._sampled_at >= SAMPLE_S:
            self._sampled_at = now
            self._sample(now)

    def close(self) -> None:
        """Stop whatever is under way; a failure is written down with what is known by now."""
        self._conclude()

    def _conclude(self) -> None:
        stacks: dict[int, Stack] = {}
        if self._taking is not None:
            self._taking.close()
            stacks = self._taking.result()
        self._taking = self._suspect = None
        if self._crash is not None:
            self._write_crash(stacks)

    def _targets(self) -> list[Target]:
        run = self._run
        targets: list[Target] = []
        for slot in run.state.slots:
            child = run.children.get(run.state.rank(slot.index))
            if slot.pid and child is not None:
                stacks = run.files / f"{slot.index}.{slot.generation}.stacks"
                armed = str(stacks) if stacks.exists() else None
                targets.append(Target(slot.index, child.born.pid, child.born.start, armed))
        return targets

    def targets(self, ranks: list[int]) -> list[Target]:
        """Who can be looked into, of these ranks."""
        return [target for target in self._targets() if target.index in ranks]

    def _track(self, now: float) -> None:
        progress = {rank.index: seen for rank, seen in self._run.progress().items()}
        for slot in self._run.state.slots:
            if slot.pid:
                self._tracker.update(slot.index, progress.get(slot.index), read_proc(slot.pid), now)

    def _sample(self, now: float) -> None:
        self._track(now)
        if self._taking is not None or self._run.state.turns:
            return
        views = self._tracker.views()
        suspect = self._watch.look(views, now)
        if suspect is not None:
            self._suspect = suspect
            self._taking = Taking(self._targets(), now, deadline_s=EVIDENCE_S)
        elif self._hang is not None:
            self._kill_if_overdue(self._hang, now)

    def _judge(self, suspect: Suspect, stacks: dict[int, Stack]) -> None:
        self._suspect = None
        self._track(time.monotonic())
        if self._watch.went_on(self._tracker.views()):
            return  # it moved while its stack was being taken
        verdict = judge(suspect, stacks)
        self._watch.answer(verdict)
        if isinstance(verdict, Busy):
            return
        self._hang = verdict
        run = self._run
        incident = Incident(
            id=incident_id(time.time(), "hang", None),
            at=time.time(),
            kind="hang",
            host=run.record.host,
            launch=run.number,
            headline=verdict.headline,
            cause=verdict.kind,
            first=run.state.rank(verdict.culprits[0]) if verdict.culprits else None,
            stacks=summarise(stacks),
            notes=list(verdict.details),
        )
        self._write(incident, stacks)
        run.tell_fact(facts.HangSeen(at=time.time(), summary=verdict.headline, incident=incident.id))

    def _kill_if_overdue(self, hang: Hang, now: float) -> None:
        timeout_s = self._run.launch.hang_timeout_s
        moved = any(view.changed_at > hang.since and view.exited is None for view in self._tracker.views())
        if moved:
            self._hang = None
        elif timeout_s is not None and now - hang.since >= timeout_s:
            self._hang = None
            culprit = hang.culprits[0] if hang.culprits else 0
            managed = any(seen.has(Flag.RUN_MANAGED) for seen in self._run.progress().values())
            self._run.feed(root.Hung(culprit, f"hung: {hang.headline}", managed=managed))

    def _write_crash(self, stacks: dict[int, Stack]) -> None:
        assert self._crash is not None
        first, cause = self._crash
        self._crash = None
        exits = [self._with_logs(exit) for exit in self._exits]
        self._exits = [exit for exit in self._exits if exit.status.ok]
        failure = first_failure(exits)
        run = self._run
        if failure is not None:
            incident = crash_incident(failure, stacks, host=run.record.host, launch=run.number)
        else:  # A hang that is treated as a failure: nobody has exited.
            incident = Incident(
                id=incident_id(time.time(), "stop", first),
                at=time.time(),
                kind="stop",
                host=run.record.host,
                launch=run.number,
                headline=cause,
                first=first,
                stacks=summarise(stacks),
            )
        self._write(incident, stacks)
        run.tell_fact(facts.IncidentTaken(at=time.time(), incident=incident.id, headline=incident.headline))
        run.feed(root.EvidenceTaken())

    def _with_logs(self, exit: Exit) -> Exit:
        stem = f"{exit.rank.index}.{exit.rank.generation}"
        logs: Path = self._run.logs
        parts = [log_tail(logs / f"{stem}.{stream}") for stream in ("out", "err")]
        return Exit(
            rank=exit.rank,
            status=exit.status,
            at=exit.at,
            asked=exit.asked,
            oom=exit.oom,
            log_tail="\n".join(part.rstrip("\n") for part in parts if part),
            exception=error_file_text(logs / f"{stem}.error.json"),
        )

    def _write(self, incident: Incident, stacks: dict[int, Stack]) -> None:
        try:
            write_incident(self._run.directory.path / "incidents", incident, stacks)
        except OSError as error:
            self._run.notice(f"the evidence could not be written: {error.strerror}")
