"""Runs without an agent: those between two agents, as the last one's log remembers them, and those that ended.

Ranks outlive their agent; those that live have a daemon that sees to the next one (`lifeline.py`).
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from argosy.control import NodeState, describe, facts
from argosy.core import ArgosyError, RankId
from argosy.fabric import connect, shared_memory_path
from argosy.observe import Page
from argosy.supervise.agent.agent_log import recall
from argosy.supervise.agent.rank_footprint import RankFootprint
from argosy.supervise.messages import RankInfo, RunInfo, from_warden
from argosy.supervise.processes import is_alive

REPLACED = "its supervisor is being replaced"


def runs_between(runtime: Path) -> list[RunInfo]:
    """The runs that go on, though no agent answers for them right now."""
    node, _ = recall(runtime)
    runs = [_info(name, node, shared_memory_path(runtime) / name) for name in node.runs]
    return [run for run in runs if any(rank.pid for rank in run.ranks) or _has_warden(runtime)]


class Ending(NamedTuple):
    """How the latest launch of a run ended; `stopped` if somebody asked for it and no rank had failed."""

    ranks: list[RankInfo]
    restarts: int
    stopped: bool


def ending_of(told: Sequence[facts.AnyFact]) -> Ending:
    """How the ranks of the latest launch ended, how often ranks were restarted in it, and whether it was stopped."""
    ranks: dict[int, RankInfo] = {}
    restarts, stopped, failed = 0, False, False
    for fact in told:
        match fact:
            case facts.LaunchStarted():
                ranks, restarts, stopped, failed = {}, 0, False, False
            case facts.Restarting():
                restarts, failed = restarts + 1, False
            case facts.StopAsked():
                stopped = True
            case facts.RankStarted(rank=rank):
                ranks[rank.index] = RankInfo(rank.index, rank.generation, 0, "lost")
            case facts.RankExited(rank=rank, status=status, asked=asked):
                failed |= not asked and not status.ok
                ranks[rank.index] = RankInfo(rank.index, rank.generation, 0, str(status))
            case _:
                pass
    return Ending([ranks[index] for index in sorted(ranks)], restarts, stopped and not failed)


def _has_warden(runtime: Path) -> bool:
    """Whether a warden listens: it starts the agent that starts the ranks which wait."""
    try:
        connect(runtime / "warden.sock", from_warden, "the warden").close()
    except ArgosyError:
        return False
    return True


def _info(name: str, node: NodeState, memory: Path) -> RunInfo:
    state, local_run = node.runs[name], node.host.runs.get(name)
    footprint = RankFootprint(name, memory, None)
    ranks: list[RankInfo] = []
    for index, slot in enumerate(state.slots):
        rank = state.rank(index)
        local = local_run.ranks.get(index) if local_run is not None else None
        process = local.process if local is not None and local.rank == rank else None
        if process is not None and is_alive(process):
            ranks.append(RankInfo(index, slot.generation, process.pid, "running", _steps(footprint, rank)))
        else:
            ranks.append(RankInfo(index, slot.generation, 0, str(slot.status or "waiting")))
    launch = state.launch
    return RunInfo(
        name,
        launch.name,
        launch.directory,
        f"{describe(state)}, {REPLACED}",
        launch.size,
        state.started_at,
        launch.detached,
        ranks,
        launch.dims,
        supervised=False,
    )


def _steps(footprint: RankFootprint, rank: RankId) -> int:
    with contextlib.suppress(OSError, ValueError):
        page = Page.open(footprint.page(rank))
        seen = page.read()
        page.detach()
        return seen.steps if seen is not None else 0
    return 0
