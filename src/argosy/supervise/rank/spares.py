"""Spares: processes that a zygote forked before anybody needs them, each waiting to be told which rank it is.

What a fork takes (the page tables of all that is imported) is then paid before a rank is lost. A spare has
nothing of a run: no environment, no group, no output; all of that comes with the rank that it becomes. How many there
are is decided in `control/spares.py`.

S1  A spare runs nothing of the user's before it is a rank.
S2  A spare ends with its zygote: it waits for a word on a socket whose other end is the zygote's alone.
"""

import os
import resource
import select
import signal
import socket
import time
from collections.abc import Callable, Collection

import msgspec
import setproctitle

from argosy.control import QUIET_S, SpareWish, decide_spares
from argosy.core import PeerLost
from argosy.fabric import Link
from argosy.supervise.messages import Fork

_decoder: "msgspec.msgpack.Decoder[Fork]" = msgspec.msgpack.Decoder(Fork)


class Spare:
    """One of them as its zygote knows it."""

    def __init__(self, pid: int, link: Link[Fork]) -> None:
        self.pid, self.link = pid, link

    @property
    def is_alive(self) -> bool:
        """It never says anything: what can be read is its end."""
        poller = select.poll()
        poller.register(self.link, select.POLLIN)
        return not poller.poll(0)

    def become(self, message: Fork, fds: list[int]) -> bool:
        """Tell it which rank it is; False if it is gone."""
        if not self.is_alive:
            self.link.close()
            return False
        try:
            os.kill(self.pid, signal.SIGCONT)  # Whoever stopped it did not mean the rank.
            self.link.send(message, fds)
            return not self.link.wants_write
        except (PeerLost, OSError):
            return False
        finally:
            self.link.close()


class Spares:
    """Those of one zygote, by run. `live` is what a forked one does; it does not return."""

    def __init__(self, live: Callable[[socket.socket, str], None]) -> None:
        self._live = live
        self._wishes: dict[str, SpareWish] = {}
        self._spares: dict[str, list[Spare]] = {}
        self._asked_at = 0.0

    @property
    def wait_s(self) -> float | None:
        """After how long to look again, if nothing happens."""
        waits = any(len(self._spares.get(run, ())) < wish.count for run, wish in self._wishes.items())
        return QUIET_S if waits else None

    def pids(self) -> dict[str, list[int]]:
        """Per run those that wait."""
        return {run: [spare.pid for spare in spares] for run, spares in self._spares.items()}

    def want(self, run: str, count: int) -> None:
        """Ranks of a run are being started, which wants so many spares."""
        self._asked_at = time.monotonic()
        if count:
            self._wishes[run] = SpareWish(count)

    def release(self, run: str) -> None:
        """A run wants none any more."""
        self._wishes.pop(run, None)

    def use(self, message: Fork, fds: list[int]) -> int:
        """Let a spare become the one rank of `message`; returns its pid, 0 if there is none."""
        spares = self._spares.get(message.run, [])
        while spares:
            spare = spares.pop(0)
            if spare.become(message, fds):
                return spare.pid
        return 0

    def mind(self, alive: Collection[str], now: float) -> None:
        """Have as many as are wanted; `alive` are the runs that have ranks."""
        for run, wish in self._wishes.items():
            self._wishes[run] = SpareWish(wish.count, None if run in alive else wish.bare_since or now)
        self._spares = {run: [each for each in spares if each.is_alive] for run, spares in self._spares.items()}
        have = {run: len(spares) for run, spares in self._spares.items()}
        for run, missing in decide_spares(self._wishes, have, self._asked_at, now).items():
            for _ in range(-missing):
                self._spares[run].pop().link.close()  # S2
            for _ in range(missing):
                self._fork(run)

    def forget(self) -> None:
        """In a forked child: they are the zygote's."""
        for spare in (spare for spares in self._spares.values() for spare in spares):
            spare.link.forget()

    def _fork(self, run: str) -> None:
        """Fork one; where that fails there are fewer, and the next turn tries again."""
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)  # A rank is told of in one piece.
        try:
            pid = os.fork()
        except OSError:
            ours.close()
            theirs.close()
            return
        if pid == 0:
            ours.close()
            self._live(theirs, run)
        theirs.close()
        self._spares.setdefault(run, []).append(Spare(pid, Link(ours, _decoder, f"spare {pid}")))


def wait_as_spare(theirs: socket.socket, run: str) -> tuple[Fork, list[int]] | None:
    """In the spare: wait for the rank that it becomes; None if it is not needed any more."""
    fd, most = theirs.fileno(), min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1 << 20)
    os.closerange(3, fd)  # S2: the ends of other spares, too.
    os.closerange(fd + 1, most)
    setproctitle.setproctitle(f"argosy: spare of {run}")
    link = Link(theirs, _decoder, "the zygote")
    poller = select.poll()
    poller.register(link, select.POLLIN)
    try:
        while True:
            poller.poll()
            for told in link.receive():
                return told
    except PeerLost:
        return None
    finally:
        link.close()
