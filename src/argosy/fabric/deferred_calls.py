"""Calls made on an event loop that cannot be sent at once: a thread sends them, so that the loop never blocks.

T1  While calls are deferred, later calls of the loop are deferred behind them: the calls of one caller run in order.
"""

import sys
import threading
from collections import deque
from collections.abc import Callable

from argosy.core import ArgosyError
from argosy.fabric.pending_call import CallContext, PendingCall, context


class DeferredCalls:
    """The deferred calls to one rank. True while there are any."""

    def __init__(self) -> None:
        self._calls: deque[tuple[Callable[[], None], PendingCall, bool, int]] = deque()
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add(self, call: Callable[[], None], pending: PendingCall, wanted: bool) -> None:
        """Let a thread make this call after those deferred before (T1), and wait for its reply if `wanted`."""
        pending.deferred = True
        with self._lock:
            self._calls.append((call, pending, wanted, context.call.chain))
            if len(self._calls) == 1:
                threading.Thread(target=self._make, name="argosy deferred calls", daemon=True).start()

    def claim(self, pending: PendingCall) -> bool:
        """The call is about to be made; False if it was withdrawn."""
        with self._lock:
            pending.deferred = False
            return not pending.done

    def withdraw(self, pending: PendingCall, error: ArgosyError) -> bool:
        """Settle a call that was not made yet with `error`; False if it was made."""
        with self._lock:
            waits = pending.deferred
            if waits and not pending.done:
                pending.settle(None, error)
            return waits

    def _make(self) -> None:
        made: list[PendingCall] = []
        waits = True
        while waits:
            call, pending, wanted, chain = self._calls[0]
            context.call = CallContext(chain)
            call()
            if wanted:
                made.append(pending)
            with self._lock:
                self._calls.popleft()
                waits = bool(self._calls)
        for pending in made:  # Their loop cannot watch a link that did not exist when they were made.
            pending.peer.wait(pending, 0.0)


def on_event_loop() -> bool:
    """Whether this thread runs an event loop, which blocking here would stop."""
    if "asyncio" not in sys.modules:
        return False
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
