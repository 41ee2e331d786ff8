"""Taking over what an earlier agent left, and learning how a process ended whose parent is not ours any more.

Zygotes and the warden report exits. A pidfd of every child stands behind that: if a child is dead and nobody reports
it within a second, its parent was killed too, and the kernel is asked instead.
"""

import os
import selectors
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from argosy._select import native
from argosy.control import facts
from argosy.core import WaitStatus
from argosy.supervise.agent import root
from argosy.supervise.agent.agent_log import Remembered, recall
from argosy.supervise.agent.running import Running
from argosy.supervise.agent.store_port import StorePort
from argosy.supervise.environment import seal_environment
from argosy.supervise.messages import ProcessId, Child, ChildExited
from argosy.supervise.processes import is_alive, open_process, zombie_status
from argosy.supervise.records.exits import read_exits
from argosy.supervise.records.rundir import read_facts

if TYPE_CHECKING:
    from argosy.supervise.agent.agent import Agent

REPORT_S = 1.0
"""How long a parent has to report an exit before the kernel is asked."""


class Adoption:
    """What is not settled yet: dead children without a report, runs whose zygote has not come back."""

    def __init__(self, agent: "Agent") -> None:
        self._agent = agent
        self._pidfds: dict[Child, int] = {}
        self._dead: dict[Child, float] = {}

    @property
    def pending(self) -> bool:
        return bool(self._dead)

    def begin(self) -> None:
        """Recall the runs of an earlier agent, take their processes over, and do what it did not live to do (P5)."""
        exits = self._exits()
        for run, remembered in recall(self._agent.runtime).items():
            running = self._take_over(run, remembered)
            if remembered.trouble:  # One run that cannot be carried on must not take the others along.
                running.state = msgspec.structs.replace(running.state, ended=True)
                running.finish(1, f"the agent cannot carry it on: {remembered.trouble}")
                continue
            running.feed(root.Recovered())  # First of all: it asks for what was decided before, and for nothing else.
            for child in list(running.children.values()):
                self._take_in(running, child, exits)
        self.learn(self._agent.inherited)
        for running in [run for run in self._agent.runs.values() if run.launch.kind == "program"]:
            if running.state.began:
                running.start_waiting(running.doubtful)
            else:
                running.feed(root.Begin())
        for name in list(self._agent.shelf):  # Of runs that were never accepted, or are over.
            os.close(self._agent.shelf.pop(name))
            self._agent.drop(name)

    def _take_in(self, running: Running, child: Child, exits: Mapping[ProcessId, WaitStatus]) -> None:
        """A process that the log knows of: it is the rank that it was, has ended, or is nobody's any more."""
        if running.state.rank(child.rank.index) != child.rank:
            if is_alive(child.process):
                running.traces.kill({child.rank: child})
            return
        if running.awaits(child.rank):
            running.feed(root.Started(child.rank, child.process.pid))
        if child.process in exits:
            running.exited(ChildExited(child, exits[child.process]))
        else:
            self.watch(child)

    def learn(self, children: Sequence[Child]) -> None:
        """Take in processes that an earlier agent asked for and did not live to write down."""
        for child in children:
            run = self._agent.runs.get(child.run)
            if run is None:
                continue
            if child.what == "store":
                unknown = run.store_child is None or run.store_child.born != child.process
            else:
                unknown = child.rank not in run.children or run.awaits(child.rank)
            if unknown:
                run.forked(child)
        for record in read_exits(self._agent.runtime):  # They may even have ended meanwhile.
            run = self._agent.runs.get(record.child.run)
            if run is not None and record.child.what == "rank" and run.awaits(record.child.rank):
                run.forked(record.child)
                self._agent.reported(ChildExited(record.child, record.status))

    def _take_over(self, run: str, remembered: Remembered) -> Running:
        agent = self._agent
        launched = remembered.launched
        fds = [agent.shelf.pop(name) for name in (f"env:{run}", f"stdin:{run}") if name in agent.shelf]
        lost = not fds
        running = Running(agent, run, launched.number, launched.launch, fds or [seal_environment({}, {})])
        running.environment_lost = lost
        running.record.started_at = launched.started_at
        running.state = remembered.state
        for rank, child in remembered.children.items():
            if child.what == "store":
                if rank.generation == running.state.store:
                    running.store_child = child
            elif rank == running.state.rank(rank.index) and running.state.slots[rank.index].alive:
                running.watch_rank(child, remembered.started_at.get(rank, time.time()))
            else:
                running.children[rank] = child
        running.inquest.recover(remembered.exits)
        if (opened := remembered.opened) is not None:
            listener = agent.shelf.pop(f"store:{run}", None)
            running.store = StorePort.known(opened.port, listener, opened.generation)
        self._recover_facts(running, remembered)
        agent.runs[run] = running
        agent.linger_s = launched.launch.linger_s
        if not launched.launch.detached:
            running.lease_until = time.monotonic() + 10.0
        return running

    def _recover_facts(self, running: Running, remembered: Remembered) -> None:
        """Record what the earlier agent was about to record."""
        recorded = read_facts(running.directory.path)
        known = {msgspec.msgpack.encode(fact) for fact in recorded}
        for fact in (running.launched, *remembered.facts):
            if msgspec.msgpack.encode(fact) not in known:
                running.tell_fact(fact)
        ends = [fact for fact in recorded if isinstance(fact, facts.LaunchEnded) and fact.launch == running.number]
        running.end_recorded = bool(ends)

    def environments(self, runs: Sequence[str], fds: list[int]) -> None:
        """Take back the environments that agent and warden lost; the caller closes `fds`."""
        for run, fd in zip(runs, list(fds), strict=False):
            running = self._agent.runs.get(run)
            if running is not None and running.environment_lost:
                os.dup2(fd, running.sealed, inheritable=False)
                running.environment_lost = False
                self._agent.hold(f"env:{run}", running.sealed)

    def whose(self, born: ProcessId) -> Child | None:
        """The child that is watched under this pid and start time."""
        return next((child for child in (*self._pidfds, *self._dead) if child.process == born), None)

    def watch(self, child: Child) -> None:
        """See to it that the end of this process is noticed, whoever its parent is."""
        try:
            fd = open_process(child.process)
        except OSError as error:  # Then only its parent sees its end.
            print(f"agent: {child.rank} is not watched: {error.strerror}", file=sys.stderr, flush=True)
            return
        if fd is None:
            self._dead[child] = time.monotonic()
            return
        self._pidfds[child] = fd
        self._agent.selector.register(fd, selectors.EVENT_READ, lambda: self._ended(child))

    def settled(self, child: Child) -> None:
        """Its exit was reported."""
        self._dead.pop(child, None)
        if (fd := self._pidfds.pop(child, None)) is not None:
            if fd in self._agent.selector.get_map():
                self._agent.selector.unregister(fd)
            os.close(fd)

    def tick(self) -> None:
        """Ask the kernel about those whose exit nobody reported."""
        if not self._dead:
            return
        late = [child for child, at in self._dead.items() if time.monotonic() - at > REPORT_S]
        if late:
            exits = self._exits()
            for child in late:
                self._agent.reported(ChildExited(child, exits.get(child.process) or self._ask_kernel(child)))
                self.settled(child)

    def _exits(self) -> dict[ProcessId, WaitStatus]:
        return {record.child.process: record.status for record in read_exits(self._agent.runtime)}

    def _ended(self, child: Child) -> None:
        if (fd := self._pidfds.get(child)) is not None:  # Else its exit was reported in this very turn.
            self._agent.selector.unregister(fd)
            self._dead.setdefault(child, time.monotonic())

    def _ask_kernel(self, child: Child) -> WaitStatus:
        if (status := zombie_status(child.process.pid)) is not None:
            return status
        pidfd = self._pidfds.get(child)
        raw = None if pidfd is None else native.pidfd_exit_status(pidfd)
        return WaitStatus() if raw is None else WaitStatus.from_wait(raw)
