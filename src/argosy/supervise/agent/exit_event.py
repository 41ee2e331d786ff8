"""What the root is told about an exit: whether there was progress before it, and who caused it. Pure."""

import signal
from collections.abc import Mapping

from argosy.core import RankId
from argosy.observe import Flag, RankProgress
from argosy.supervise.agent import root
from argosy.supervise.messages import ChildExited

CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
"""Signals that a process brings upon itself."""
STEADY_S = 10.0
"""A rank that lived this long counts as having made progress, even if it shows no steps."""


def exit_event(message: ChildExited, progress: Mapping[RankId, RankProgress], lived_s: float, oom: str) -> root.Exited:
    """Judge an exit by what the progress pages of the run's ranks say."""
    rank, status = message.child.rank, message.status
    managed = any(page.has(Flag.RUN_MANAGED) for page in progress.values())
    # What others do that it was not started with, or that only wait for it, is no sign that it fares better.
    started_with = {each for each in progress if each.generation == rank.generation and not managed}
    movers = [seen for each, seen in progress.items() if each == rank or each in started_with]
    own = status.code is not None or status.signal in CRASHES
    own = own and not (rank in progress and progress[rank].has(Flag.REPLACE))
    # One that ends itself after its first step, time and again, gets nowhere.
    steps_min = 2 if own and managed else 1
    return root.Exited(
        rank,
        status,
        progressed=(lived_s > STEADY_S and not managed) or any(_moved(page, steps_min) for page in movers),
        grouped=any(page.has(Flag.PROCESS_GROUP) for page in progress.values()),
        managed=managed,
        hopeless=any(page.has(Flag.NO_REPLACEMENT) for page in progress.values()),
        own=own,
        oom=oom,
        cpu_s=message.cpu_s,
        max_rss_bytes=message.max_rss_bytes,
    )


def _moved(progress: RankProgress, steps_min: int) -> bool:
    """Whether a rank did what it is there for."""
    if progress.has(Flag.RUN_MANAGED):
        return progress.steps >= steps_min
    return bool(progress.steps or progress.collectives or progress.has(Flag.SERVED))
