"""A run that this agent is the head of: its directory, those who watch it, and evidence about it."""

import contextlib
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from argosy.control import Forgotten, ForRun, RunEvent, RunState, facts
from argosy.core import ArgosyError, ProcessId, host_label
from argosy.fabric import Link
from argosy.observe import RankProgress
from argosy.supervise.agent.decisions import Decisions
from argosy.supervise.agent.disk_watch import DiskWatch
from argosy.supervise.agent.hosted_run import HostedRun
from argosy.supervise.agent.log_upkeep import disk_is_full
from argosy.supervise.agent.remote_ranks import AllTaking
from argosy.supervise.evidence.evidence_shell import Evidence
from argosy.supervise.evidence.proc_sample import ProcSample, read_proc
from argosy.supervise.evidence.stacks import StackTaking, Taking, Target
from argosy.supervise.messages import Happened, Message, Notice, ToAgent
from argosy.supervise.records.rundir import RunDir, facts_of_launch, new_record

if TYPE_CHECKING:
    from argosy.supervise.agent.run_hosts import RunHosts


class HeadedRun:
    """The run's records and watchers."""

    def __init__(self, hosted: HostedRun, decisions: Decisions) -> None:
        self.number, self.launch = hosted.number, hosted.launch
        self.directory = Path(hosted.launch.directory)
        self.logs, self.files, self.jobs = hosted.logs, hosted.files, hosted.jobs
        self.records = RunDir(self.directory)
        self.record = new_record(hosted.launch, hosted.number, decisions.clock.now())
        self.watchers = Watchers()
        self.evidence = Evidence(self)
        self._hosted, self._decisions = hosted, decisions
        self._recorded: set[bytes] = set()
        """Facts that an earlier agent recorded."""
        self.disks = DiskWatch(self, decisions.log)
        self.hosts: RunHosts | None = None
        """The other hosts of the run, if it has any."""

    def open(self) -> None:
        """Make the run's directories.

        Raises:
            OSError: there is no room, or no permission.
        """
        (self.directory / "incidents").mkdir(parents=True, exist_ok=True)
        self._hosted.make_directories()
        self.records.write_record(self.record)

    def recover(self) -> None:
        """Take the run over from an earlier agent."""
        self.record.started_at = self.state.started_at
        recorded = facts_of_launch(self.directory, self.number)
        self.evidence.recover(recorded)
        self._recorded = {msgspec.msgpack.encode(fact) for fact in recorded}
        self._hosted.footprint.groups = {
            fact.rank: fact.pid for fact in recorded if isinstance(fact, facts.RankStarted)
        }
        pauses = {fact.rank: fact for fact in recorded if isinstance(fact, facts.RankPaused)}
        self._hosted.paused = {
            rank.index: fact.signal
            for rank, fact in pauses.items()
            if not fact.resumed and rank == self.state.rank(rank.index)
        }

    @property
    def name(self) -> str:
        return self._hosted.name

    # --- what its evidence asks for

    @property
    def host(self) -> str:
        return self.record.host

    @property
    def state(self) -> RunState:
        return self._decisions.state.runs[self.name]

    def feed(self, event: RunEvent) -> None:
        self._decisions.feed(ForRun(self.name, event))

    def progress(self) -> dict[int, RankProgress]:
        """What the pages of the current generation say."""
        pages, state = self._hosted.pages, self.state
        ranks = [state.rank(index) for index in range(len(state.slots))]
        if self.hosts is not None:
            return self.hosts.ranks.progress(ranks)
        found = {rank.index: pages.read(rank) for rank in ranks}
        return {index: seen for index, seen in found.items() if seen is not None}

    def proc_of(self, index: int) -> ProcSample | None:
        """The process of a rank, as the kernel of its host saw it."""
        process = self.process_of(index)
        if process is not None or self.hosts is None:
            return None if process is None else read_proc(process.pid)
        return self.hosts.ranks.proc(self.state.rank(index))

    @property
    def is_blind(self) -> bool:
        """Whether a host with ranks has told nothing of late."""
        living = [index for index, slot in enumerate(self.state.slots) if slot.pid]
        return self.hosts is not None and any(self.hosts.ranks.is_stale(self.state.rank(index)) for index in living)

    def take_stacks(self, indices: Sequence[int], deadline_s: float, native: Sequence[int] = ()) -> StackTaking:
        """Begin to take the stacks of living ranks, wherever they are."""
        targets = list[Target]()
        for index in indices:
            if (process := self.process_of(index)) is not None:
                file = self.files / f"{index}.{self.state.slots[index].generation}.stacks"
                armed = str(file) if file.exists() else None
                targets.append(Target(index, process.pid, process.start, armed))
        here = Taking(targets, time.monotonic(), deadline_s=deadline_s, native=native)
        if self.hosts is None:
            return here
        known = {target.index for target in targets}
        far = {self.state.rank(index): self.host_of(index) for index in indices if index not in known}
        return AllTaking([here, self.hosts.ranks.take(far, deadline_s, native)])

    def host_of(self, index: int) -> str:
        """Where a rank is."""
        host = self.state.slots[index].host
        return host_label(host) if host_label(host) != host else self.record.host

    def process_of(self, index: int) -> ProcessId | None:
        """The process of a rank, if it lives on this host."""
        local_run = self._decisions.state.host.runs.get(self.name)
        local = None if local_run is None else local_run.ranks.get(index)
        return None if local is None or local.rank != self.state.rank(index) else local.process

    def is_paused(self, index: int) -> bool:
        """Whether a rank was stopped by a signal."""
        if self.hosts is None:
            return index in self._hosted.paused
        seen = self.hosts.ranks.find(self.state.rank(index))
        return seen is not None and seen.paused

    # --- who listens

    def tell_fact(self, fact: facts.AnyFact) -> None:
        """Record a fact and tell the watchers; one that an earlier agent recorded is not recorded again."""
        if msgspec.msgpack.encode(fact) not in self._recorded:
            self.records.record(fact)
            self.evidence.follow(fact)
        self.watchers.tell(Happened(self.name, fact))
        self.disks.check()

    def notice(self, text: str) -> None:
        """A line for the user."""
        self.watchers.tell(Notice(text))

    def note_managed(self) -> None:
        """Note that the run can be resumed as soon as that is known: a power cut would leave no time for it."""
        if self.state.managed and not self.record.managed:
            self.record.managed = True
            self.records.write_record(self.record)

    # --- the end

    def conclude(self) -> None:
        """Every rank is gone: end the search for evidence, and note how far the run came."""
        self.evidence.close()
        self.record.managed = self.state.managed > 0 or self.record.managed
        if (seen := self.progress().get(0)) is not None:
            self.record.steps = seen.reached or seen.steps

    def finish(self, code: int, reason: str) -> None:
        """The run is over: record that after all that is under way, and let the next launch have the directory."""
        record = partial(self.jobs.do, "finishing", partial(disk_is_full, self.logs))
        if self.hosts is None:
            record(partial(self._finished, code, reason))
        else:
            self.hosts.give_back(partial(record, partial(self._finished, code, reason)))

    def _finished(self, code: int, reason: str, disk_full: bool | Exception) -> None:
        self.disks.checked(disk_full if isinstance(disk_full, Exception) else ([], disk_full))
        self.record.state, self.record.code, self.record.reason = "ended", code, reason
        self.record.ended_at = time.time()
        self.records.write_record(self.record)
        ended = facts.LaunchEnded(at=self.record.ended_at, launch=self.number, code=code, reason=reason)
        recorded = [msgspec.msgpack.decode(fact, type=facts.AnyFact) for fact in self._recorded]
        if any(isinstance(fact, facts.LaunchEnded) for fact in recorded):
            self.watchers.tell(Happened(self.name, ended))
        else:
            self.tell_fact(ended)
        self.records.close()
        self.records.release(self.name)
        self._decisions.feed(Forgotten(self.name))


class Watchers:
    """The clients that hear of a run; with the one that has the lease the run ends."""

    def __init__(self) -> None:
        self._links: list[Link[ToAgent]] = []
        self._lease: Link[ToAgent] | None = None

    def add(self, link: Link[ToAgent], *, lease: bool) -> None:
        self._links.append(link)
        if lease:
            self._lease = link

    def remove(self, link: Link[ToAgent]) -> bool:
        """Forget a link that ended; whether it had the lease."""
        if link in self._links:
            self._links.remove(link)
        leased = self._lease is link
        self._lease = None if leased else self._lease
        return leased

    def tell(self, message: Message) -> None:
        """Send to every watcher; who cannot take it is dropped by the agent later."""
        for link in self._links:
            with contextlib.suppress(ArgosyError):
                link.queue(message)  # The agent's loop flushes.
