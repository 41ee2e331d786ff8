"""Calls that cannot be sent at once, made on an event loop: nothing may wait there, so a thread does.

T1  While calls wait, later ones of the loop wait behind them: calls of one caller run in their order.
"""

import sys
import threading
from collections import deque
from collections.abc import Callable

from argosy.core import ArgosyError
from argosy.fabric.ticket import Doing, Ticket, context


class LateCalls:
    """Those to one rank. True while there are any."""

    def __init__(self) -> None:
        self._calls: deque[tuple[Callable[[], None], Ticket, bool, int]] = deque()
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add(self, call: Callable[[], None], ticket: Ticket, wanted: bool) -> None:
        """Let a thread make this call, after those that wait already (T1), and hear its answer if it is `wanted`."""
        ticket.late = True
        with self._lock:
            self._calls.append((call, ticket, wanted, context.doing.chain))
            if len(self._calls) == 1:
                threading.Thread(target=self._make, name="argosy late calls", daemon=True).start()

    def claim(self, ticket: Ticket) -> bool:
        """The call is made now; False if it was withdrawn."""
        with self._lock:
            ticket.late = False
            return not ticket.done

    def withdraw(self, ticket: Ticket, error: ArgosyError) -> bool:
        """Give a call up that was not made yet; False if it was."""
        with self._lock:
            waits = ticket.late
            if waits and not ticket.done:
                ticket.settle(None, error)
            return waits

    def _make(self) -> None:
        made: list[Ticket] = []
        waits = True
        while waits:
            call, ticket, wanted, chain = self._calls[0]
            context.doing = Doing(chain)
            call()
            if wanted:
                made.append(ticket)
            with self._lock:
                self._calls.popleft()
                waits = bool(self._calls)
        for ticket in made:  # Their loop watches no link that was not there when they were made.
            ticket.peer.wait(ticket, 0.0)


def on_event_loop() -> bool:
    """Whether this thread runs coroutines: then others of them wait for whatever waits here."""
    if "asyncio" not in sys.modules:
        return False
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
