"""What an agent answers when somebody looks at its runs."""

import contextlib
import os
import time
from collections.abc import Iterable, Mapping

from argosy.control import LocalZygote, RunState, Slot, describe, rank_defaults
from argosy.core import PeerLost, host_label
from argosy.fabric import Link
from argosy.supervise.agent.headed_run import HeadedRun
from argosy.supervise.agent.hosted_run import HostedRun
from argosy.supervise.evidence.frames import group_stacks, place, stacks_text
from argosy.supervise.messages import (
    DaemonInfo,
    Environment,
    GetEnvironment,
    RankInfo,
    Refused,
    RunInfo,
    Runs,
    Stacks,
    StackText,
    TakeStacks,
    ToAgent,
)
from argosy.supervise.processes import start_ticks

STACKS_S = 10.0


def answer_list(
    runs: Iterable[HeadedRun], hosted: Mapping[str, HostedRun], zygotes: Iterable[LocalZygote], warden_pid: int
) -> Runs:
    """The living runs and what lingers."""
    daemons = [DaemonInfo("warden", warden_pid), DaemonInfo("agent", os.getpid())]
    there = [zygote.process for zygote in zygotes if zygote.phase != "returning"]
    daemons += [DaemonInfo("zygote", process.pid) for process in there if process is not None]
    return Runs([_info(run, hosted[run.name]) for run in runs], daemons)


def _info(run: HeadedRun, hosted: HostedRun) -> RunInfo:
    steps = {index: progress.reached or progress.steps for index, progress in run.progress().items()}
    ranks = [
        RankInfo(
            index,
            slot.generation,
            slot.pid,
            _rank_state(slot, run.is_paused(index)),
            steps.get(index, 0),
            host_label(slot.host) if host_label(slot.host) != slot.host else "",
        )
        for index, slot in enumerate(run.state.slots)
    ]
    return RunInfo(
        run.name,
        run.launch.name,
        run.launch.directory,
        describe(run.state) + (", disk trouble" if run.disks.has_trouble else ""),
        run.launch.size,
        run.record.started_at,
        run.launch.detached,
        ranks,
        run.launch.dims,
        [pid for pid in hosted.spares if start_ticks(pid) is not None],
    )


def _rank_state(slot: Slot, paused: bool) -> str:
    """One word or two."""
    if slot.starting:
        return "starting"
    if slot.pid:
        return "stopped" if paused else "running"
    return str(slot.status) if slot.status is not None else "waiting"


class StackRequest:
    """Stacks of some ranks that are being taken for a client."""

    def __init__(self, link: Link[ToAgent], run: HeadedRun, message: TakeStacks) -> None:
        visible = [index for index in run.evidence.visible() if index in message.ranks]
        self.link, self._ranks = link, message.ranks
        self._taking = run.take_stacks(visible, STACKS_S, visible[:1] if message.native else ())

    def step(self) -> bool:
        """Continue; True when the answer was sent, in which equal stacks are grouped."""
        if not self._taking.step(time.monotonic()):
            return False
        stacks = self._taking.result()
        groups = [
            StackText(list(ranks), stacks_text({ranks[0]: stack}), place(stack))
            for ranks, stack in group_stacks(stacks)
        ]
        missing = [index for index in self._ranks if index not in stacks]
        with contextlib.suppress(PeerLost):
            self.link.send(Stacks(groups, [f"rank {index} is not alive" for index in missing]))
        return True

    def close(self) -> None:
        """Nobody waits for the answer any more."""
        self._taking.close()


def answer_environment(link: Link[ToAgent], run: HostedRun, state: RunState, message: GetEnvironment) -> None:
    """Hand over the environment of a rank, sealed as it is."""
    if not 0 <= message.rank < run.launch.size:
        link.send(Refused(f"no such rank: {message.rank}", f"this run has ranks 0-{run.launch.size - 1}"))
        return
    host = state.slots[message.rank].host
    if host_label(host) != host:
        link.send(Refused(f"rank {message.rank} is on another host: {host_label(host)}"))
        return
    at = (state.address, state.port)
    spec = run.spec(state.rank(message.rank), at, state.view, store=run.launch.store)
    link.send(Environment({**spec.variables}, rank_defaults(run.launch), run.launch.cwd), [run.environment.sealed])
