"""A rank that leaves the loop of steps before its end: it says so, and the others do not wait for it.

V1  Leaving is a mistake only while another rank is inside a step: all may leave after the same one, each in its time.
"""

import dis
import sys
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING

import msgspec

from argosy.core import ArgosyError, PeerLost, WaitStatus
from argosy.train.step import Diverged, Step

if TYPE_CHECKING:
    from argosy.train.run import Run

LOOK_S = 0.5
"""How often a rank that waits looks whether another has left."""
HINT = "leave on all ranks after the same step, or call run.stop(), which ends the loop on all ranks"
_ENDED = str(WaitStatus(code=0))


class Left(msgspec.Struct, frozen=True):
    """Who left, after which step, and where in its script."""

    rank: int
    step: int
    site: str
    loop: int = 0

    def __str__(self) -> str:
        return f"rank {self.rank} left the loop after step {self.step:,}" + (f" ({self.site})" if self.site else "")


class Leaving:
    """What this rank says when it leaves, and how it hears that another did."""

    def __init__(self, run: "Run") -> None:
        self._run = run
        self._looked_at = 0.0
        self._ended = ""
        self.loop = 0
        """Which call of `run.steps` this is. A script may go through several loops, one after the other."""
        self._over = threading.Event()

    def watch(self) -> None:
        """Look from now on whether a step that takes long waits for a rank that left."""
        self._over = threading.Event()
        if self._run.crew.board is not None:
            threading.Thread(target=self._watch, args=[self._over], name="argosy-lookout", daemon=True).start()

    def end(self) -> None:
        """The loop has ended."""
        self._over.set()

    def _watch(self, over: threading.Event) -> None:
        run, before = self._run, None
        while not over.wait(LOOK_S):
            step: Step | None = run.current
            if step is not None and step is before and not step.rehearsal:
                with suppress(RuntimeError, ArgosyError):  # The store is gone, and soon this process too.
                    if (left := self._left()) is not None:
                        run.crew.group.give_up(PeerLost(f"rank {left.rank}", str(left)))
            before = step

    def say(self, site: str) -> None:
        """This rank leaves."""
        if (board := self._run.crew.board) is not None:
            board.set("argosy/left", msgspec.json.encode(Left(self._run.rank, self._run.step, site, self.loop)))

    def broke(self, frame: FrameType | None) -> None:
        """The script let go of the loop; what an exception of its own does is none of this."""
        if frame is not None and dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("POP"):
            self.say(f"{frame.f_code.co_filename}:{frame.f_lineno}")

    def check(self, *, at_once: bool = False) -> None:
        """Where a lost rank is waited for, or ranks do different things.

        Raises:
            Diverged: one has left; nobody comes in its place.
        """
        if at_once or time.monotonic() - self._looked_at >= LOOK_S:
            self._looked_at = time.monotonic()
            if who := self._left() or self._ended:
                raise Diverged(f"{who} while the other ranks continued", hint=HINT) from None

    def judge(self, number: int, loss: ArgosyError | None) -> None:
        """A loss ended an attempt at step `number`: perhaps a process ended as if all were done."""
        self._looked_at = 0.0
        if isinstance(loss, PeerLost) and loss.cause == _ENDED:
            self._ended = f"{loss.peer} ended with exit code 0, in or before step {number:,}"

    def _left(self) -> Left | None:
        board = self._run.crew.board
        if board is None or not board.check(["argosy/left"]):
            return None
        left = msgspec.json.decode(board.get("argosy/left"), type=Left)
        return left if left.rank != self._run.rank and left.loop >= self.loop else None


def caller() -> str:
    """Where in the user's script Argosy was called."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith("argosy."):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def site_of(error: BaseException) -> str:
    """Where in the user's script it was raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
