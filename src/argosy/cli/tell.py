"""What the terminal says about a running run: one line for each fact that matters to the user. Pure."""

from argosy.control import facts
from argosy.core import RankId, format_ranks, signal_name


class Teller:
    """Puts facts into words. A failure and its consequence are one line: the consequence waits for the evidence."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._waiting: dict[RankId | None, tuple[str, str]] = {}
        """By the rank that failed: what follows, and the cause in case that no evidence comes."""
        self._exited: dict[RankId | None, str] = {}
        self._told = set[RankId | None]()
        """Failures that were reported before their evidence came."""

    def lines(self, fact: facts.AnyFact) -> list[str]:
        """What to say now that `fact` is known."""
        match fact:
            case facts.RankExited(rank=rank, status=status, oom=oom, device=device):
                self._exited[rank] = f"rank {rank.index} failed: {device or oom or status}"
                return []
            case facts.Restarting(failed=failed, cause=cause):
                self._waiting[failed] = restart_line(fact), self._exited.get(failed, cause)
                return []
            case facts.GaveUp(failed=failed, reason=reason):
                self._waiting[failed] = f"not restarted: {reason}", self._exited.get(failed, "")
                return []
            case facts.IncidentTaken(failed=failed) if failed in self._told:
                self._told.discard(failed)
                return []
            case facts.IncidentTaken(failed=failed, headline=headline):
                consequence, _ = self._waiting.pop(failed, ("", ""))
                # The output of the only rank says itself how it failed.
                return ["; ".join(filter(None, [headline, consequence]))] if consequence or self._size > 1 else []
            case facts.RankStarted() | facts.LaunchEnded():  # No evidence came.
                self._told |= self._waiting.keys()
                waited, self._waiting = self._waiting, {}
                return ["; ".join(filter(None, [cause, consequence])) for consequence, cause in waited.values()]
            case _:
                return [text] if (text := line(fact, self._size)) else []


def restart_line(fact: facts.Restarting) -> str:
    """`restarting ranks 0-3 in 2 s (generation 1)`."""
    later = f" in {fact.delay_s:g} s" if fact.delay_s else ""
    why = f", because {fact.note}" if fact.note else ""
    many = "s" if len(fact.ranks) > 1 else ""
    return f"restarting rank{many} {format_ranks(fact.ranks)}{later}{why} (generation {fact.generation})"


def line(fact: facts.AnyFact, size: int) -> str:
    """The line for a fact that stands for itself; "" if the user need not know."""
    match fact:
        case facts.RankPaused(rank=rank, signal=number, resumed=False):
            return f"rank {rank.index} stopped ({signal_name(number)})"
        case facts.RankPaused(rank=rank, resumed=True):
            return f"rank {rank.index} continued"
        case facts.HangSeen(summary=summary):
            return f"hang: {summary}"
        case facts.HangEnded(lasted_s=lasted_s):
            return f"hung for {lasted_s:.0f} s, then resumed"
        case facts.StopAsked(by=by) if size > 1:
            return f"stopping: {by}"
        case facts.HostLost() | facts.DeviceExcluded():
            return fact.text
        case facts.DiskTrouble(what=what):
            return what
        case _:
            return ""
