"""What a user reads about a run while it goes on: one line per fact that matters."""

from argosy.core import format_ranks
from argosy.core.status import signal_name
from argosy.process import facts


def line(fact: facts.AnyFact, size: int) -> str | None:
    """The line for a fact, or None if it is nobody's news."""
    match fact:
        case facts.RankExited(rank=rank, status=status, asked=False, oom=oom) if not status.ok and size > 1:
            return f"rank {rank.index}: {status}" + (f", out of memory: {oom}" if oom else "")
        case facts.RankExited(status=status, asked=False, oom=oom) if oom:
            return f"{status}, out of memory: {oom}"
        case facts.RankPaused(rank=rank, signal=number, resumed=False):
            return f"rank {rank.index} is stopped ({signal_name(number)})"
        case facts.RankPaused(rank=rank, resumed=True):
            return f"rank {rank.index} goes on"
        case facts.Restarting(ranks=ranks, cause=cause, delay_s=delay_s):
            later = f" in {delay_s:g} s" if delay_s else ""
            plural = "s" if len(ranks) > 1 else ""
            return f"restarting rank{plural} {format_ranks(ranks)}{later}: {cause}"
        case facts.GaveUp(reason=reason):
            return f"no more restarts: {reason}"
        case facts.HangSeen(summary=summary):
            return f"hang: {summary}"
        case facts.IncidentTaken(headline=headline) if size > 1:
            return headline
        case facts.StopAsked(by=by) if size > 1:
            return f"stopping: {by}"
        case facts.LogTrouble(what=what):
            return what
        case _:
            return None
