"""Wishes to end: by the script, by SIGTERM, by Ctrl-C. All ranks end after the same step, which is saved."""

import contextlib
import signal
import sys
import threading
from enum import IntEnum
from types import FrameType
from typing import Any


class Wish(IntEnum):
    """What is wished; if ranks wish different things, the larger counts."""

    NOTHING = 0
    STOP = 1
    LEAVE = 2
    INTERRUPT = 3


class Wishes:
    """Those of this rank, and what all agreed on."""

    def __init__(self) -> None:
        self.asked = Wish.NOTHING
        self.agreed = Wish.NOTHING
        self.is_urgent = False
        self._reason = ""
        self._before: dict[int, Any] = {}

    def ask(self, wish: Wish, reason: str = "") -> None:
        self.asked = max(self.asked, wish)
        self._reason = self._reason or reason

    def agree(self, wish: int) -> None:
        self.agreed = max(self.agreed, Wish(wish))

    def outcome(self, step: int) -> str:
        """The line that says how the loop ended after `step`."""
        if self.agreed is Wish.STOP:
            return f"stopped after step {step:,}" + (f": {self._reason}" if self._reason else "")
        return f"{self.said}: saved step {step:,}; the same command resumes from there"

    @property
    def said(self) -> str:
        """What came from outside."""
        return "interrupted" if max(self.asked, self.agreed) is Wish.INTERRUPT else "stopped by SIGTERM"

    def listen(self) -> None:
        """Take SIGTERM and SIGINT as wishes; a second SIGINT interrupts at once."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, wish in ((signal.SIGTERM, Wish.LEAVE), (signal.SIGINT, Wish.INTERRUPT)):
            with contextlib.suppress(ValueError, OSError):
                self._before[number] = signal.signal(number, self._heard(wish))

    def restore(self) -> None:
        for number, handler in self._before.items():
            with contextlib.suppress(ValueError, OSError, TypeError):
                signal.signal(number, handler)
        self._before = {}

    def _heard(self, wish: Wish) -> Any:
        def handle(number: int, _frame: FrameType | None) -> None:
            if self.asked >= wish and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.ask(wish)
            self.is_urgent = True

        return handle

    def check(self) -> None:
        """Where no step can be reached any more: leave at once."""
        if self.is_urgent:
            self.agreed = self.asked
            self.leave(False)

    def leave(self, reached: bool) -> None:
        """End the process as it was wished, unless the run is complete anyway or the script asked itself."""
        if reached or self.agreed <= Wish.STOP:
            return
        self.restore()
        sys.exit(128 + (signal.SIGINT if self.agreed is Wish.INTERRUPT else signal.SIGTERM))
