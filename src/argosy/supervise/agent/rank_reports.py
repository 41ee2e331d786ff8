"""What a host tells the head of a run about its ranks: how far they are, and where, when asked."""

import math
import time
from collections.abc import Mapping

from argosy.control import LocalRank
from argosy.supervise.agent.decisions import Decisions
from argosy.supervise.agent.host_messages import HostTunnel, RankSeen, RanksSeen, StacksTaken, TakeHostStacks
from argosy.supervise.agent.hosted_run import HostedRun
from argosy.supervise.agent.tunnels import Tunnels
from argosy.supervise.evidence.proc_sample import read_proc
from argosy.supervise.evidence.stacks import Taking, Target


class RankReports:
    """Looks at the ranks of this host."""

    def __init__(self, decisions: Decisions, hosted: Mapping[str, HostedRun], tunnels: Tunnels) -> None:
        self._decisions, self._hosted, self.tunnels = decisions, hosted, tunnels
        self._taking: list[tuple[int, Taking]] = []
        self.ahead_max = math.inf
        """By no more than this the clock of this host is ahead of the head's."""

    @property
    def is_busy(self) -> bool:
        """Whether stacks are being taken."""
        return bool(self._taking)

    def seen(self) -> RanksSeen | None:
        """What all ranks show; None without ranks."""
        ranks = [
            self._see(self._hosted[name], local)
            for name, run in self._decisions.state.host.runs.items()
            if name in self._hosted
            for local in run.ranks.values()
            if local.phase == "running"
        ]
        return RanksSeen(ranks) if ranks else None

    def _see(self, run: HostedRun, local: LocalRank) -> RankSeen:
        proc = None if local.process is None else read_proc(local.process.pid)
        return RankSeen(local.rank, run.pages.read(local.rank), proc, local.rank.index in run.paused)

    def take(self, request: TakeHostStacks) -> None:
        """Begin to take stacks."""
        hosted = self._hosted.get(request.run)
        targets = [] if hosted is None else self._targets(hosted, request)
        taking = Taking(targets, time.monotonic(), deadline_s=request.deadline_s, native=request.native)
        self._taking.append((request.number, taking))

    def _targets(self, hosted: HostedRun, request: TakeHostStacks) -> list[Target]:
        found: list[Target] = []
        for local in self._decisions.state.host.runs[hosted.name].ranks.values():
            if local.rank in request.ranks and local.process is not None:
                file = hosted.files / f"{local.rank.index}.{local.rank.generation}.stacks"
                armed = str(file) if file.exists() else None
                found.append(Target(local.rank.index, local.process.pid, local.process.start, armed))
        return found

    def step(self, now: float) -> list[StacksTaken | HostTunnel]:
        """Continue; returns what is to be sent."""
        done = [(number, taking) for number, taking in self._taking if taking.step(now)]
        self._taking = [each for each in self._taking if each not in done]
        return [*(StacksTaken(number, taking.result()) for number, taking in done), *self.tunnels.take()]
