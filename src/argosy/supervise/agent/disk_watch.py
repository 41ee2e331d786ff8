"""What the disks under a run do not take: its records, the output of its ranks, the agent log. Said once each."""

import time
from functools import partial
from pathlib import Path
from typing import Protocol

from argosy.control import Launch, facts
from argosy.supervise.agent.agent_log import AgentLog
from argosy.supervise.agent.log_upkeep import bound_logs, disk_is_full
from argosy.supervise.background_jobs import BackgroundJobs
from argosy.supervise.records.rundir import RunDir


class OnDisk(Protocol):
    """A run whose disks are watched."""

    launch: Launch
    logs: Path
    jobs: BackgroundJobs
    records: RunDir

    def tell_fact(self, fact: facts.AnyFact) -> None: ...
    def notice(self, text: str) -> None: ...


class DiskWatch:
    """Keeps a run's logs bounded, and says when something cannot be written."""

    def __init__(self, run: OnDisk, log: AgentLog) -> None:
        self._run, self._log = run, log
        self._troubles: dict[str, str] = {}
        """What disks do not take, by its kind."""
        self._bounding = False

    @property
    def has_trouble(self) -> bool:
        return any(self._troubles.values())

    def check(self) -> None:
        """Say once what a disk does not take."""
        log, records = self._log.trouble, self._run.records.trouble
        self._note(
            "log", log and f"the agent log cannot be written ({log}): an agent that is restarted now forgets this run"
        )
        self._note("records", records and f"the run's records cannot be written ({records}): kept until there is room")

    def _note(self, kind: str, what: str) -> None:
        """Say `what` if it is new; "" if there is no trouble of this kind."""
        before, self._troubles[kind] = self._troubles.get(kind, ""), what
        if what and not before:
            self._run.tell_fact(facts.DiskTrouble(at=time.time(), what=what))

    def upkeep(self) -> None:
        """Keep the logs bounded, and say when output is being lost."""
        run = self._run
        run.records.retry()
        self.check()
        if not self._bounding:
            self._bounding = True
            work = partial(bound_logs, run.logs, run.launch.log_bytes_max)
            run.jobs.do("bounding logs", lambda: (work(), disk_is_full(run.logs)), self.checked)

    def checked(self, outcome: tuple[list[str], bool] | Exception) -> None:
        """Say what the logs' disk does not take."""
        self._bounding = False
        troubles, full = ([str(outcome)], False) if isinstance(outcome, Exception) else outcome
        for trouble in troubles:
            self._run.notice(f"a log could not be bounded: {trouble}")
        self._note("output", f"the disk is full, output is lost: {self._run.logs}" if full else "")
