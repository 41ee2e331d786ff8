"""Runs without an agent: those between two agents, as the last one's log remembers them, and those that ended.

Ranks outlive their agent; those that live have a daemon that sees to the next one (`lifeline.py`).
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path

from argosy.control import facts
from argosy.core import ArgosyError, RankId
from argosy.fabric import connect, shared_memory_path
from argosy.observe import Page
from argosy.supervise.agent import root
from argosy.supervise.agent.agent_log import Remembered, recall
from argosy.supervise.agent.rank_footprint import Traces
from argosy.supervise.messages import RankInfo, RunInfo, from_warden
from argosy.supervise.processes import is_alive

REPLACED = "its supervisor is being replaced"


def runs_between(runtime: Path) -> list[RunInfo]:
    """The runs that go on, though no agent answers for them right now."""
    runs = [_info(run, remembered, shared_memory_path(runtime) / run) for run, remembered in recall(runtime).items()]
    return [run for run in runs if any(rank.pid for rank in run.ranks) or _has_warden(runtime)]


def ended_ranks(told: Sequence[facts.AnyFact]) -> tuple[list[RankInfo], int]:
    """How the ranks of the latest launch ended, and how often ranks were restarted in it."""
    ranks: dict[int, RankInfo] = {}
    restarts = 0
    for fact in told:
        match fact:
            case facts.LaunchStarted():
                ranks, restarts = {}, 0
            case facts.Restarting():
                restarts += 1
            case facts.RankStarted(rank=rank):
                ranks[rank.index] = RankInfo(rank.index, rank.generation, 0, "lost")
            case facts.RankExited(rank=rank, status=status):
                ranks[rank.index] = RankInfo(rank.index, rank.generation, 0, str(status))
            case _:
                pass
    return [ranks[index] for index in sorted(ranks)], restarts


def _has_warden(runtime: Path) -> bool:
    """Whether a warden listens: it starts the agent that starts the ranks which wait."""
    try:
        connect(runtime / "warden.sock", from_warden, "the warden").close()
    except ArgosyError:
        return False
    return True


def _info(run: str, remembered: Remembered, memory: Path) -> RunInfo:
    launched, state, traces = remembered.launched, remembered.state, Traces(run, memory, None)
    ranks: list[RankInfo] = []
    for slot in state.slots:
        rank = state.rank(slot.index)
        child = remembered.children.get(rank)
        if child is not None and is_alive(child.process):
            ranks.append(RankInfo(slot.index, slot.generation, child.process.pid, "running", _steps(traces, rank)))
        else:
            ranks.append(RankInfo(slot.index, slot.generation, 0, str(slot.status or "waiting")))
    launch = launched.launch
    return RunInfo(
        run,
        launch.name,
        launch.directory,
        f"{root.describe(state)}, {REPLACED}",
        launch.size,
        launched.started_at,
        launch.detached,
        ranks,
        launch.dims,
        supervised=False,
    )


def _steps(traces: Traces, rank: RankId) -> int:
    with contextlib.suppress(OSError, ValueError):
        page = Page.open(traces.page(rank))
        seen = page.read()
        page.detach()
        return seen.steps if seen is not None else 0
    return 0
