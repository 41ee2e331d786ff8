"""What a user reads about a run while it goes on: one line per fact that matters."""

from argosy.core import format_ranks, signal_name
from argosy.control import facts


class Teller:
    """Puts facts into words, in the order of cause and consequence: a failure and what follows from it are one line.

    A restart is decided before the evidence of the failure is on disk, and may be known before it or right after it.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._failures: list[str] = []
        """Told to nobody yet: what follows from them comes with the next fact."""
        self._waiting: list[tuple[str, str]] = []
        """Consequences that wait for their failure, each with its cause if that is never told."""
        self._told = set[str]()
        """Causes that were told with their consequence, before there was evidence: it is no more news."""

    def lines(self, fact: facts.AnyFact) -> list[str]:
        """What to say now that `fact` is known."""
        said = [text] if (text := line(fact, self._size)) is not None else []
        before, self._failures = self._failures, []
        match fact:
            case facts.IncidentTaken(headline=headline) if (cause := headline.replace(" failed: ", ": ")) in self._told:
                self._told.discard(cause)
                return before
            case facts.IncidentTaken() if self._waiting:
                return [*before, "; ".join([*said, self._waiting.pop(0)[0]])]
            case facts.IncidentTaken():
                self._failures = said
                return before
            case facts.Restarting() | facts.GaveUp():
                if before:
                    return ["; ".join([*before, *said])]
                cause = f"{fact.cause.partition('; ')[0]}; " if isinstance(fact, facts.Restarting) else ""
                self._waiting += [(text, cause) for text in said]
                return []
            case facts.RankStarted() | facts.LaunchEnded():  # No evidence came.
                waited, self._waiting = self._waiting, []
                self._told |= {cause.removesuffix("; ") for _, cause in waited}
                return [*before, *(cause + text for text, cause in waited), *said]
            case _:
                return [*before, *said]


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
