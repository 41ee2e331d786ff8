"""Fold tracebacks of ranks that failed only because another rank had failed. Pure: the caller passes `now`.

F1  A traceback is folded if its exception speaks of a lost connection and another rank failed first.
F2  Until the evidence says which rank that is, such a traceback is held; after HOLD_S it is shown whole.
F3  What a rank wrote to one stream keeps its order: what follows a held traceback waits behind it.
"""

import re
import textwrap
from collections.abc import Callable, Iterable

from argosy.supervise import Out, Stream, exception_line, is_connection_error, last_traceback

HOLD_S = 10.0
"""Longer than evidence takes."""
_LINE_MAX = 80
_SOURCE = re.compile(r"\[/[^\]]*\] ?")
"""Where in torch's C++ sources an error was raised."""


class Folder:
    """Stands between the merged output and the terminal."""

    def __init__(self, log_of: Callable[[int, Stream], str]) -> None:
        """`log_of` says in which file the text of a rank is."""
        self._log_of = log_of
        self._held: dict[tuple[int, Stream], list[Out]] = {}
        self._held_since: dict[tuple[int, Stream], float] = {}
        self.first: int | None = None
        """The rank that failed first, as far as it is known; None again when ranks are restarted."""

    def take(self, outs: Iterable[Out], now: float, *, final: bool = False) -> list[Out | str]:
        """Return what to write now: output as it is, or lines of Argosy's own; `final` holds nothing back."""
        shown: list[Out | str] = []
        for out in outs:
            key = min(out.ranks), out.stream
            if key in self._held or (len(out.ranks) == 1 and error_in(out.text)):
                self._held.setdefault(key, []).append(out)
                self._held_since.setdefault(key, now)
            else:
                shown.append(out)
        for key in list(self._held):
            if final or self.first is not None or now - self._held_since[key] >= HOLD_S:
                del self._held_since[key]
                shown += [self._fold(key, out) for out in self._held.pop(key)]
        return shown

    def _fold(self, key: tuple[int, Stream], out: Out) -> Out | str:
        rank, stream = key
        if self.first in (None, rank) or not (raised := error_in(out.text)):
            return out
        raised = _SOURCE.sub("", raised)
        short = textwrap.shorten(raised, _LINE_MAX, placeholder=" ...")
        return f"rank {rank} failed after rank {self.first}: {short}; full text: {self._log_of(rank, stream)}"


def error_in(text: bytes) -> str:
    """The exception of a traceback that a lost connection ended; "" if the text is anything else."""
    if b"Traceback (most recent call last)" not in text:
        return ""
    raised = exception_line(last_traceback(text.decode(errors="replace")))
    return raised if is_connection_error(raised) else ""
