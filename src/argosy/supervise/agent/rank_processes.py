"""The processes of ranks on this host: started, signalled, killed, and watched until they end.

Zygotes and the warden report exits. A pidfd of every rank stands behind that: if a rank is dead and nobody reports it
in time, its parent was killed too, and the kernel is asked instead.
"""

import contextlib
import os
import selectors
import signal
import sys
import time
from collections.abc import Mapping
from functools import partial

from argosy._select import native
from argosy.control import (
    AskKernel,
    ChildEnded,
    ChildForked,
    ChildRefused,
    ChildSilent,
    DeviceFault,
    EnvironmentLost,
    ForHost,
    ForkRanks,
    KillTree,
    LocalRank,
    PageRead,
    SendSignal,
    TreeKilled,
    command,
)
from argosy.core import ProcessId, RankId, WaitStatus
from argosy.supervise.agent.decisions import Decisions
from argosy.supervise.agent.hosted_run import HostedRun
from argosy.supervise.agent.torch_stores import TorchStores
from argosy.supervise.agent.warden_link import WardenLink
from argosy.supervise.agent.zygote_links import ZygoteLinks
from argosy.supervise.evidence.oom import OomWatch
from argosy.supervise.evidence.xid import KernelLog
from argosy.supervise.messages import Child, ChildExited, Fork, RankSpec, Spawn
from argosy.supervise.processes import open_process, send_signal, zombie_status
from argosy.supervise.records.exits import read_exits


class RankProcesses:
    """Performs what `control/host.py` decides about ranks, and reports what becomes of them."""

    def __init__(
        self,
        decisions: Decisions,
        runs: Mapping[str, HostedRun],
        starters: "Starters",
        selector: selectors.BaseSelector,
    ) -> None:
        self._decisions, self._runs, self._starters, self._selector = decisions, runs, starters, selector
        self._pidfds: dict[tuple[str, RankId], int] = {}
        self._oom, self._kernel_log = OomWatch(), KernelLog()

    # --- effects

    def fork(self, effect: ForkRanks) -> None:
        """Start ranks."""
        run = self._runs.get(effect.run)
        locals_ = (self._find(effect.run, rank) for rank in effect.ranks)
        ranks = [local.rank for local in locals_ if local is not None and local.phase == "asked"]
        if run is None or not ranks:
            return
        if run.environment.unusable:
            self._decisions.feed(ForHost(EnvironmentLost(effect.run, run.environment.unusable)))
        elif run.environment.is_lost:
            self._decisions.feed(ForHost(EnvironmentLost(effect.run)))
        else:
            self._starters.start(run, effect, ranks)

    def signal(self, effect: SendSignal) -> None:
        local, run = self._find(effect.run, effect.rank), self._runs.get(effect.run)
        if local is not None and local.process is not None:
            send_signal(local.process, effect.signal)
            if run is not None and effect.rank.index in run.paused:  # A stopped process would keep it pending.
                send_signal(local.process, signal.SIGCONT)

    def kill(self, effect: KillTree) -> None:
        """Kill a rank and its descendants; of an earlier generation too, or one that nobody has told of."""
        killed = ForHost(TreeKilled(effect.run, effect.rank))
        if (run := self._runs.get(effect.run)) is None:
            self._decisions.feed(killed)
            return
        local = self._find(effect.run, effect.rank)
        run.footprint.kill(effect.rank, local.process if local is not None else None)
        if run.footprint.must_sweep:
            sweep = partial(run.footprint.sweep, [effect.rank])
            run.kills.do("killing ranks", sweep, lambda _: self._decisions.feed(killed))
        else:
            self._decisions.feed(killed)

    def ask_kernel(self, effect: AskKernel) -> None:
        """Find out how a rank ended whose parent did not say: from the record of exits, or from the kernel."""
        local = self._find(effect.run, effect.rank)
        if local is None or local.process is None:
            return
        exits = {record.child.process: record.status for record in read_exits(self._starters.warden.runtime)}
        status = exits.get(local.process) or self._kernel_status(effect, local.process)
        self._end(effect.run, effect.rank, ChildEnded(effect.run, effect.rank, status))

    def _kernel_status(self, effect: AskKernel, process: ProcessId) -> WaitStatus:
        if (status := zombie_status(process.pid)) is not None:
            return status
        pidfd = self._pidfds.get((effect.run, effect.rank))
        raw = None if pidfd is None else native.pidfd_exit_status(pidfd)
        return WaitStatus() if raw is None else WaitStatus.from_wait(raw)

    # --- events

    def forked(self, child: Child) -> None:
        """A rank's process exists."""
        if (run := self._runs.get(child.run)) is None or child.run not in self._decisions.state.host.runs:
            send_signal(child.process, signal.SIGKILL)  # Its run is over.
            return
        local = self._find(child.run, child.rank)
        if local is None or local.process not in (None, child.process):
            run.footprint.kill(child.rank, child.process)  # Nobody asked for it.
        run.footprint.groups[child.rank] = child.process.pid
        self._decisions.feed(ForHost(ChildForked(child.run, child.rank, child.process)))
        self._watch(child.run, child.rank)

    def refused(self, run: str, rank: RankId, reason: str) -> None:
        """A rank could not be started; its log says why."""
        if run in self._runs:
            with contextlib.suppress(OSError), open(self._runs[run].error_log(rank), "a") as log:
                log.write(f"argosy: rank {rank.index} cannot start: {reason}\n")
        self._decisions.feed(ForHost(ChildRefused(run, rank, reason)))

    def exited(self, message: ChildExited) -> None:
        """The parent of a rank reports how it ended."""
        child, status = message.child, message.status
        local = self._find(child.run, child.rank)
        if local is None or local.process not in (None, child.process):
            return
        if not status.ok and not local.asked:  # What follows depends on how far the ranks were.
            self.read_pages(child.run)
        oom = self._oom.explain(child.process, status, asked=local.asked)
        device = None if status.ok or local.asked else self._device_fault(child.run, local, child.process)
        ended = ChildEnded(child.run, child.rank, status, oom, message.cpu_s, message.max_rss_bytes, device)
        self._end(child.run, child.rank, ended)

    def _device_fault(self, name: str, local: LocalRank, process: ProcessId) -> DeviceFault | None:
        """What the kernel's log says of the device of a rank that failed."""
        launch = self._runs[name].launch if name in self._runs else None
        own = launch.devices[local.rank.index % launch.ranks_per_host] if launch and launch.devices else ""
        began_s = process.start / os.sysconf("SC_CLK_TCK")
        return self._kernel_log.explain(process.pid, local.device or own, began_s)

    def _end(self, run: str, rank: RankId, event: ChildEnded) -> None:
        if (fd := self._pidfds.pop((run, rank), None)) is not None:
            if fd in self._selector.get_map():
                self._selector.unregister(fd)
            os.close(fd)
        if run in self._runs:
            self._runs[run].paused.pop(rank.index, None)
        self._decisions.feed(ForHost(event))

    def read_pages(self, name: str) -> None:
        """Report what the pages of a run's ranks show, where that has changed."""
        run, local_run = self._runs.get(name), self._decisions.state.host.runs.get(name)
        if run is None or local_run is None:
            return
        for local in local_run.ranks.values():
            seen = run.pages.read(local.rank) if local.phase == "running" else None
            if seen is None:
                continue
            shown = (int(seen.flags), min(seen.steps, 2), seen.collectives > 0)
            if shown != local.noted:
                self._decisions.feed(ForHost(PageRead(name, local.rank, *shown)))

    def sample_memory(self) -> None:
        """Now and then: know how the memory was before a rank is killed."""
        self._oom.sample(time.monotonic())

    # --- watching

    def recover(self, name: str) -> None:
        """Watch the ranks of a run that an earlier agent had started, or learn how they ended meanwhile."""
        exits = [record for record in read_exits(self._starters.warden.runtime) if record.child.run == name]
        for record in [record for record in exits if record.child.what == "rank"]:
            local = self._find(name, record.child.rank)
            if local is not None and local.phase == "asked":  # The earlier one was not told that it had started.
                self._decisions.feed(ForHost(ChildForked(name, record.child.rank, record.child.process)))
            if local is not None and local.process == record.child.process:
                self._decisions.feed(ForHost(ChildEnded(name, record.child.rank, record.status)))
        if (run := self._decisions.state.host.runs.get(name)) is not None:
            hosted, ordered = self._runs[name], list(run.ranks.values())
            hosted.footprint.ordered |= {local.rank for local in ordered}
            for local in [local for local in ordered if local.phase == "running"]:
                self._watch(name, local.rank)

    def find(self, process: ProcessId) -> Child | None:
        """The rank that this process is."""
        for name, run in self._decisions.state.host.runs.items():
            for local in run.ranks.values():
                if local.process == process:
                    return Child(name, local.rank, process)
        return None

    def _watch(self, name: str, rank: RankId) -> None:
        """Make sure that the end of a rank is noticed, whichever process is its parent."""
        local = self._find(name, rank)
        if local is None or local.process is None or (name, rank) in self._pidfds:
            return
        self._oom.start(local.process, time.monotonic())
        try:
            fd = open_process(local.process)
        except OSError as error:  # Then only its parent sees its end.
            print(f"agent: {rank} is not watched: {error.strerror}", file=sys.stderr, flush=True)
            return
        if fd is None:
            self._decisions.feed(ForHost(ChildSilent(name, rank)))
            return
        self._pidfds[name, rank] = fd
        self._selector.register(fd, selectors.EVENT_READ, lambda: self._silent(name, rank, fd))

    def _silent(self, name: str, rank: RankId, fd: int) -> None:
        self._selector.unregister(fd)
        self._decisions.feed(ForHost(ChildSilent(name, rank)))

    def _find(self, name: str, rank: RankId) -> LocalRank | None:
        run = self._decisions.state.host.runs.get(name)
        local = None if run is None else run.ranks.get(rank.index)
        return local if local is not None and local.rank == rank else None


class Starters:
    """Who makes processes: zygotes fork ranks, the warden executes them."""

    def __init__(self, warden: WardenLink, zygotes: ZygoteLinks, stores: TorchStores) -> None:
        self.warden, self._zygotes, self._stores = warden, zygotes, stores

    def start(self, run: HostedRun, asked: ForkRanks, ranks: list[RankId]) -> None:
        """Fork or execute ranks of those asked for. Only the first generation of rank 0 gets standard input."""
        if not asked.key:
            self._stores.release(run.name)
        at, serves = (asked.address, asked.port), self._stores.serves(run.name)
        specs = [
            run.spec(rank, at, asked.view, store=serves, device=asked.devices.get(rank.index, "")) for rank in ranks
        ]
        environment = run.environment
        with_stdin = environment.stdin is not None and ranks[0] == RankId("main", 0, 0)
        if not asked.key:
            for position, spec in enumerate(specs):
                self._execute(run, spec, with_stdin=with_stdin and position == 0)
            return
        fds = [environment.sealed]
        if with_stdin and environment.stdin is not None:
            fds.append(environment.stdin)
        self._zygotes.send(self._zygotes.of_run(run.name), Fork(run.launch, run.name, specs, with_stdin), fds)

    def _execute(self, run: HostedRun, spec: RankSpec, *, with_stdin: bool) -> None:
        environment = run.environment
        fds = [environment.sealed]
        if with_stdin and environment.stdin is not None:
            fds.append(environment.stdin)
        argv = command(run.launch, spec.rank.index % run.launch.ranks_per_host)
        message = Spawn(run.name, spec, argv, run.launch.cwd, run.launch.umask, stdin=with_stdin)
        self.warden.send(message, fds)
