"""What a user reads about a run while it goes on: one line per fact that matters."""

from argosy.core import format_ranks, signal_name
from argosy.process.run import facts


class Teller:
    """Puts facts into words, in the order of cause and consequence.

    A restart is decided before the evidence of the failure is on disk: its line waits for the failure's.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._waiting: list[str] = []
        self._causes: list[str] = []
        """Of those that wait: said only if no failure tells it."""
        self._ahead = 0
        """Failures that were told and whose consequence was not."""

    def lines(self, fact: facts.AnyFact) -> list[str]:
        """What to say now that `fact` is known."""
        said = [text] if (text := line(fact, self._size)) is not None else []
        match fact:
            case facts.IncidentTaken():
                said = ["; ".join([*said, *self._waiting[:1]])] if said or self._waiting else []
                self._ahead += not self._waiting
                del self._waiting[:1], self._causes[:1]
            case facts.Restarting() | facts.GaveUp():
                if not self._ahead:
                    self._waiting += said
                    self._causes += [fact.cause if isinstance(fact, facts.Restarting) else ""]
                    return []
                self._ahead -= 1
            case facts.RankStarted() | facts.LaunchEnded():  # No evidence came.
                causes = [f"{cause}; " if cause else "" for cause in self._causes]
                said = [cause + text for cause, text in zip(causes, self._waiting, strict=True)] + said
                self._waiting, self._causes = [], []
            case _:
                pass
        return said


def line(fact: facts.AnyFact, size: int) -> str | None:
    """The line for a fact, or None if it is nobody's news."""
    match fact:
        case facts.RankPaused(rank=rank, signal=number, resumed=False):
            return f"rank {rank.index} is stopped ({signal_name(number)})"
        case facts.RankPaused(rank=rank, resumed=True):
            return f"rank {rank.index} goes on"
        case facts.Restarting(ranks=ranks, generation=generation, cause=cause, delay_s=delay_s):
            later = f" in {delay_s:g} s" if delay_s else ""
            plural = "s" if len(ranks) > 1 else ""
            why = cause.partition("; ")[2]  # What follows the failure itself.
            said = f"restarting rank{plural} {format_ranks(ranks)}{later} as generation {generation}"
            return f"{why}; {said}" if why else said
        case facts.GaveUp(reason=reason):
            return f"no more restarts: {reason}"
        case facts.HangSeen(summary=summary):
            return f"hang: {summary}"
        case facts.IncidentTaken(headline=headline) if size > 1 or "out of memory" in headline:
            return headline
        case facts.StopAsked(by=by) if size > 1:
            return f"stopping: {by}"
        case facts.LogTrouble(what=what):
            return what
        case _:
            return None
