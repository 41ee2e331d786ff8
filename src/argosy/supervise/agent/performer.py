"""Performs what the machines of `control` decide, and passes on what the processes of this host report."""

import selectors
import signal
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from argosy.control import (
    AskKernel,
    EndDaemons,
    Finish,
    ForHost,
    ForkRanks,
    ImportIn,
    KillTree,
    Letter,
    ListenFor,
    NodeEffect,
    OfHost,
    OfRun,
    Record,
    RememberSpoiled,
    RemoveRun,
    RetireZygote,
    RunRemoved,
    SendSignal,
    SpawnZygote,
    TakeEvidence,
    TellUser,
    facts,
)
from argosy.fabric import ForkHelper, Link
from argosy.supervise.agent.decisions import Decisions
from argosy.supervise.agent.headed_run import HeadedRun
from argosy.supervise.agent.hosted_run import HostedRun
from argosy.supervise.agent.rank_processes import RankProcesses, Starters
from argosy.supervise.agent.torch_stores import TorchStores
from argosy.supervise.agent.warden_link import WardenLink
from argosy.supervise.agent.zygote_links import ZygoteLinks
from argosy.supervise.evidence.proc_sample import read_proc
from argosy.supervise.messages import (
    ORPHAN,
    ChildExited,
    ChildPaused,
    ChildReport,
    ForkBeside,
    Forked,
    ForkFailed,
    Release,
    ToAgent,
    ZygoteHello,
)
from argosy.supervise.processes import end_process

if TYPE_CHECKING:
    from argosy.supervise.agent.head_link import HeadLink


class Performer:
    """Effects out, reports in."""

    def __init__(
        self,
        decisions: Decisions,
        hosted: Mapping[str, HostedRun],
        headed: Mapping[str, HeadedRun],
        warden: WardenLink,
        selector: selectors.BaseSelector,
    ) -> None:
        self._decisions, self._hosted, self._headed, self._warden = decisions, hosted, headed, warden
        self.zygotes = ZygoteLinks(warden.runtime, decisions, hosted, warden)
        self._stores = TorchStores(decisions, hosted, self.zygotes, warden, selector)
        self.ranks = RankProcesses(decisions, hosted, Starters(warden, self.zygotes, self._stores), selector)
        self._is_idle = False
        """Nothing was asked for as long as daemons linger."""
        self.head: HeadLink | None = None
        """If this is a host of another agent's run."""
        self._on_host: dict[type, Callable[[Any], None]] = {
            ForkRanks: self.ranks.fork,
            SendSignal: self.ranks.signal,
            KillTree: self.ranks.kill,
            AskKernel: self.ranks.ask_kernel,
            SpawnZygote: self.zygotes.spawn,
            ImportIn: self.zygotes.import_in,
            RetireZygote: self.zygotes.retire,
            RememberSpoiled: self.zygotes.remember,
            ListenFor: self._stores.listen,
            RemoveRun: self._remove,
            TellUser: self._tell_user,
            EndDaemons: self._end_daemons,
        }

    # --- effects

    def perform(self, effect: NodeEffect) -> None:
        """Do one thing that was decided."""
        match effect:
            case OfRun(name):
                if name in self._headed:
                    self._perform_for_run(effect, self._headed[name])
            case OfHost(wanted):
                self._on_host[type(wanted)](wanted)
            case Letter() if effect.run in self._headed:
                if (hosts := self._headed[effect.run].hosts) is not None:
                    hosts.post(effect)
            case Letter():
                if self.head is not None:
                    self.head.post(effect)

    def _perform_for_run(self, effect: OfRun, run: HeadedRun) -> None:
        match effect.effect:
            case Record(fact):
                run.tell_fact(fact)
            case TakeEvidence(first, cause):
                run.evidence.take(first, cause)
            case Finish(code, reason):
                run.finish(code, reason)
            case _:
                raise AssertionError(effect)

    def _tell_user(self, effect: TellUser) -> None:
        if effect.run in self._headed:
            self._headed[effect.run].notice(effect.text)
        elif self.head is not None:
            self.head.say(effect.text)

    def _end_daemons(self, effect: EndDaemons) -> None:
        self._is_idle = True

    @property
    def quitting(self) -> bool:
        """Whether the daemons are to end. A host stays until its run needs it no more."""
        return self._is_idle and (self.head is None or self.head.dismissed)

    def _remove(self, effect: RemoveRun) -> None:
        """Leave nothing of a run on this host but its directory."""
        name = effect.run
        run, local = self._hosted[name], self._decisions.state.host.runs[name]
        if name in self._headed:
            self._headed[name].conclude()
        if run.launch.spares:
            self.zygotes.send(self.zygotes.of_run(name), Release(name))
        self._stores.release(name)
        run.pages.close()
        store = local.store.process if local.store is not None else None

        def remove() -> None:
            run.remove()
            if store is not None:
                end_process(store)

        run.jobs.do("finishing", remove, lambda _: self._decisions.feed(ForHost(RunRemoved(name))))

    # --- reports

    def recover(self, name: str) -> None:
        """Take over the processes of a run from an earlier agent."""
        if name in self._decisions.state.runs:
            self._hosted[name].meeting.generation = self._decisions.state.runs[name].store_generation
        self.ranks.recover(name)
        self._stores.recover(name)

    def zygote_came(self, link: Link[ToAgent], hello: ZygoteHello, fds: list[int]) -> None:
        """A zygote connected: it has children, and environments that agent and warden may have lost."""
        for name, fd in zip(hello.runs, fds, strict=False):
            if name in self._hosted and self._hosted[name].environment.is_lost:
                self._hosted[name].environment.find(fd)
                self._warden.hold(f"env:{name}", fd)
        for child in hello.children:
            self.reported(Forked(child))
        for name in {child.run for child in hello.children} & set(self._hosted):
            self.ranks.recover(name)
        self.zygotes.came(link, hello)
        for name in {child.run for child in hello.children} & set(self._hosted):
            self.compare_pauses(name)
        for name in self._hosted:
            self._stores.watch(name)

    def reported(self, message: ChildReport) -> None:
        """A zygote or the warden says what became of a child."""
        match message:
            case Forked(child):
                starts = {"zygote": self.zygotes.spawned, "store": self._stores.forked, "rank": self.ranks.forked}
                if child.what in starts:
                    starts[child.what](child)
            case ForkFailed(run, rank, reason):
                if rank.mesh == "zygote":
                    self.zygotes.refused(run, reason)
                else:
                    self.ranks.refused(run, rank, reason)
            case ChildExited(child) if child.what == ORPHAN:
                if (known := self.ranks.find(child.process)) is not None:
                    self.ranks.exited(ChildExited(known, message.status, message.max_rss_bytes, message.cpu_s))
            case ChildExited(child):
                if child.what == "zygote":
                    self.zygotes.ended(child.run, child.process)
                elif child.what == "store":
                    self._stores.ended(child)
                elif child.what == "hosts":
                    if child.run in self._headed and (hosts := self._headed[child.run].hosts) is not None:
                        hosts.provider_ended()
                else:
                    self.ranks.exited(message)
            case ChildPaused(child, number):
                if child.what == ORPHAN:
                    child = self.ranks.find(child.process)
                if child is not None and child.what == "rank" and child.run in self._hosted:
                    self._pause(child.run, child.rank.index, number)

    def compare_pauses(self, name: str) -> None:
        """Report which ranks were stopped by a signal, or continued, while no agent heard of it."""
        run, local_run = self._hosted[name], self._decisions.state.host.runs.get(name)
        for index, local in local_run.ranks.items() if local_run is not None else ():
            sample = read_proc(local.process.pid) if local.process is not None else None
            if sample is not None and sample.state != "t" and (sample.state == "T") != (index in run.paused):
                self._pause(name, index, signal.SIGSTOP if sample.state == "T" else 0)

    def _pause(self, name: str, index: int, number: int) -> None:
        """A rank was stopped by a signal (0: it continues)."""
        if number:
            self._hosted[name].paused[index] = number
        else:
            self._hosted[name].paused.pop(index, None)
        if (run := self._headed.get(name)) is None:
            return
        fact = facts.RankPaused(at=time.time(), rank=run.state.rank(index), signal=number, resumed=number == 0)
        run.tell_fact(fact)

    def assist(self, message: ForkHelper, fds: list[int]) -> None:
        """Have the zygote fork a process beside a rank; without a zygote the rank sees its descriptors closed."""
        run, known = self._hosted.get(message.run), self._decisions.state.host.runs.get(message.run)
        local = None if known is None else known.ranks.get(message.rank.index)
        process = local.process if local is not None and local.rank == message.rank else None
        if run is not None and process is not None:
            beside = ForkBeside(run.launch, message.entry, process.pid, run.footprint.leaf(message.rank))
            self.zygotes.send(self.zygotes.of_run(run.name), beside, fds)
