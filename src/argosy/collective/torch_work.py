"""Wait for torch's own backends, watched from outside: they name nobody, and may wait on for a rank that is gone.

I1  No wait outlives a loss that the watch reports.
"""

import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from argosy.collective.peer_links import Links
from argosy.collective.shared_memory import SharedMemory
from argosy.core import DeadlinePassed, PeerLost, WaitStatus

POLL_S = 0.02
ASK_S = 0.002
GRACE_S = 1.0
"""How long to wait for the watch, which names the lost rank: torch's own error often comes first, without a name."""
_ENDED = str(WaitStatus(code=0))


class ConnectionLost(PeerLost):
    """A connection of torch broke, and no process is known to have ended: perhaps nobody will be replaced."""


Watch = SharedMemory | Links
"""What reports that a rank is lost."""


class WatchedEngine:
    """What all engines over torch's backends have in common: the watch knows of losses, and tells the other ranks."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    @property
    def on_loss(self) -> Callable[[], None]:
        return self.watch.on_loss

    @on_loss.setter
    def on_loss(self, call: Callable[[], None]) -> None:
        self.watch.on_loss = call

    def check(self) -> None:
        self.watch.check()

    def abort(self, cause: str) -> None:
        self.watch.abort(cause)

    def close(self) -> None:
        self.watch.close()


class Patience:
    """How long one operation is waited for, and by whom it is watched."""

    def __init__(self, watch: Watch, what: str, timeout_s: float) -> None:
        self._watch, self.what, self.timeout_s = watch, what, timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._farewell: float | None = None

    def check(self) -> None:
        """Raise if there is no use in waiting any longer.

        A rank that has ended well may have done so because the operation is over: its last bytes may be on the way.
        """
        try:
            self._watch.check()
        except PeerLost as loss:
            self._farewell = self._farewell or time.monotonic()
            if loss.cause != _ENDED or time.monotonic() - self._farewell > GRACE_S:
                raise
        if time.monotonic() > self._deadline + GRACE_S:
            raise DeadlinePassed(self.what, self.timeout_s)

    def until(self, done: Callable[[], bool]) -> None:
        """Ask again and again, ever more slowly, until it is so."""
        pause_s = ASK_S
        while not done():
            self.check()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, POLL_S)

    def poll(self, work: Any) -> None:
        """Wait by polling: a wait in Gloo cannot be cancelled, and would block the exit of the process."""
        began, looked = time.monotonic(), 0.0
        while not work.is_completed():
            now = time.monotonic()
            if now - looked > POLL_S:
                looked = now
                self.check()
            time.sleep(min(POLL_S, max(0.00005, (now - began) / 20)))
        work.wait()

    def call(self, function: Callable[[], Any]) -> Any:
        """Call in a thread, which is abandoned if the group is lost meanwhile."""
        found: list[Any] = []
        failed: list[BaseException] = []
        done = threading.Event()

        def run() -> None:
            try:
                found.append(function())
            except BaseException as error:
                failed.append(error)
            done.set()

        threading.Thread(target=run, name="argosy-torch", daemon=True).start()
        while not done.wait(POLL_S):
            self.check()
        if failed:
            raise failed[0]
        return found[0]

    def explain(self, error: RuntimeError) -> NoReturn:
        """Raise PeerLost or DeadlinePassed if an error of torch tells of one, else the error itself.

        A connection that broke while all live is known to this rank alone: it tells the others.
        """
        text = str(error)
        if any(sign in text for sign in ("onnection", "ocket", "eer", "NCCL", "abort")):
            end = time.monotonic() + GRACE_S
            while time.monotonic() < end:
                self._watch.check()
                time.sleep(0.002)
            self._watch.abort(f"a connection broke: {text}")
            raise ConnectionLost("a peer", text) from error
        if "imed out" in text:
            raise DeadlinePassed(f"{self.what}: {text}", self.timeout_s) from error
        raise error
