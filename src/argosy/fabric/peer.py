"""The calling end of links to ranks: a socket per rank, shared by all threads of the process.

The thread that waits for a reply reads it itself; while it does, it settles what it reads for others. A call that
cannot be sent at once reads replies meanwhile, so that two ends that both send never wait for each other.
"""

import contextlib
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from argosy.core import ArgosyError, DeadlinePassed, PeerLost
from argosy.fabric.calls import Caller, Gone, Oracle
from argosy.fabric.door import ask_busy, tell_cancel
from argosy.fabric.frames import STALE, Call, Frame, Hello, Parcel, Reader, pack, send_some
from argosy.fabric.frames import Reply as ReplyFrame
from argosy.fabric.late import LateCalls, on_event_loop
from argosy.fabric.link import BadFrame, peer_credentials
from argosy.fabric.segments import ours
from argosy.fabric.ticket import Ticket, context

if TYPE_CHECKING:
    import asyncio

CAUSE_S = 2.0
"""How long a caller waits to hear why its peer is gone."""
START_S = 300.0
"""How long a call without a deadline waits for a rank that does not listen yet."""
_SILENCE_S = 1.0
"""After this long without an answer somebody asks whether the peer still lives."""
_SLOW_S = 60.0


class Peer:
    """One rank as this process calls it, at the same address through all of its generations."""

    def __init__(self, path: Path, name: str, oracle: Oracle) -> None:
        self.path, self.name, self.oracle = path, name, oracle
        self.caller: Caller[Ticket] = Caller()
        self.sock: socket.socket | None = None
        self._lock = threading.RLock()
        """Guards caller and socket, and is held while a frame is sent."""
        self._reading = threading.Lock()
        self._settled = threading.Condition(threading.Lock())
        self._waiters = 0
        self._reader = Reader(name)
        self._poll = select.poll()
        self._unsent: list[bytes | memoryview] = []
        self._link = 0
        self._link_pid = 0
        self._late = LateCalls()
        self._watched: dict[asyncio.AbstractEventLoop, int] = {}

    # --- calling

    def call(self, parcel: Parcel, actor: str, method: str, deadline: float, wanted: bool) -> Ticket:
        """Send a call; its outcome is the ticket's, also if it could not even be sent."""
        ticket = Ticket(self)
        if self._late and on_event_loop():
            self._late.add(partial(self._call, ticket, parcel, actor, method, deadline, wanted), ticket, wanted)
        else:
            self._call(ticket, parcel, actor, method, deadline, wanted)
        return ticket

    def _call(self, ticket: Ticket, parcel: Parcel, actor: str, method: str, deadline: float, wanted: bool) -> None:
        """Send a call on an open link, or have a thread do it where waiting for one would stop an event loop."""
        lock, caller, body, chain = self._lock, self.caller, parcel.body, context.doing.chain
        # Another thread may be sending to a rank that does not read.
        if not lock.acquire(False):
            if on_event_loop():
                self._late.add(partial(self._call, ticket, parcel, actor, method, deadline, wanted), ticket, wanted)
                return
            if not lock.acquire(timeout=max(0.0, deadline - time.monotonic()) if deadline else -1):
                ticket.settle(None, DeadlinePassed(f"room for a call to {self.name}", 0.0, hint=self.busy()))
                return
        try:
            while True:
                sock = self.sock
                if sock is None or caller.is_full:
                    if self._prepare(deadline):
                        continue
                    self._late.add(partial(self._call, ticket, parcel, actor, method, deadline, wanted), ticket, wanted)
                    return
                if ticket.late and not self._late.claim(ticket):
                    return
                ticket.number = number = caller.begin(ticket, deadline)
                if self.sock is not sock and caller.give_up(number) is not None:
                    continue  # A reader lost the link before it could see this call.
                freed = self._reader.take_freed() if self._reader.freed else ()
                call = Call(number, caller.generation, actor, method, body, deadline, chain, wanted, freed)
                # Who is gone takes nothing: then this call is for the next generation.
                if self._send(call, parcel):
                    break
            if not wanted:
                caller.give_up(number)
        except ArgosyError as error:
            if not ticket.late or self._late.claim(ticket):
                ticket.settle(None, error)
        finally:
            lock.release()

    def _prepare(self, deadline: float) -> bool:
        """Have a link that takes a call, waiting for it; False if an event loop would have to."""
        if on_event_loop():
            return self.sock is None and self._connect()
        if self.sock is None:
            self._open(deadline)
        else:
            self._make_room(deadline)
        return True

    def wait(self, ticket: Ticket, until: float) -> bool:
        """Wait for a call's outcome; False if it is not there at `until` (0 for ever)."""
        asked_at = 0.0
        while not ticket.done:
            left = until - time.monotonic() if until else _SILENCE_S
            if left <= 0:
                return False
            if not self._pump(min(left, _SILENCE_S), ticket) and not ticket.done and left >= _SILENCE_S:
                self._check_fate()
                asked_at = self._say_who_is_slow(asked_at)
        return True

    def _pump(self, timeout_s: float, ticket: Ticket | None) -> bool:
        """Read once, or wait for whoever reads; False if nothing came within the time."""
        if (host := context.doing.host) is not None and (sock := self.sock) is not None:
            if not host.serve_while_waiting(sock.fileno(), select.POLLIN, timeout_s, ticket):
                return False
            timeout_s = 0.0
        if self._reading.acquire(blocking=False):
            try:
                return (ticket is not None and ticket.done) or self._hear(timeout_s)
            finally:
                self._reading.release()
                if self._waiters:
                    with self._settled:
                        self._settled.notify_all()
        with self._settled:
            self._waiters += 1
            if ticket is None or not ticket.done:
                self._settled.wait(min(timeout_s, 0.05))
            self._waiters -= 1
        return True

    def cancel(self, ticket: Ticket, error: ArgosyError) -> bool:
        """Give a call up, and tell the callee; False if it was settled before."""
        if ticket.late and self._late.withdraw(ticket, error):
            return True
        link = self._link  # Without the lock: whoever holds it may wait for this very call.
        if self.caller.give_up(ticket.number) is not ticket:
            return False
        ticket.settle(None, error)
        tell_cancel(self.path, link, ticket.number)
        return True

    def busy(self) -> str:
        """One clause about what keeps the rank from answering."""
        return ask_busy(self.path, self.name)

    def poke(self) -> None:
        """Read what is there without waiting, unless somebody reads already: for event loops."""
        if self._reading.acquire(blocking=False):
            try:
                self._hear(0.0)
            finally:
                self._reading.release()

    def check(self) -> None:
        """After a silence: whether the rank still lives."""
        self._check_fate()

    def watch(self, loop: "asyncio.AbstractEventLoop") -> socket.socket | None:
        """Let an event loop read for whoever awaits a reply there; returns what `unwatch` wants back."""
        sock = self.sock
        if sock is None or sock.fileno() < 0:
            return None
        self._watched[loop] = self._watched.get(loop, 0) + 1
        loop.add_reader(sock, self.poke)
        return sock

    def unwatch(self, loop: "asyncio.AbstractEventLoop", sock: socket.socket | None) -> None:
        """One reply is awaited less."""
        if sock is None or sock is not self.sock or loop not in self._watched:
            return
        self._watched[loop] -= 1
        if self._watched[loop] <= 0:
            del self._watched[loop]
            loop.remove_reader(sock)

    def close(self, cause: str) -> None:
        """End the link; calls in flight are lost."""
        self._lose(self.sock, cause)

    def forget(self) -> None:
        """In a forked child: the link is the parent's."""
        if self.sock is not None:
            self.sock.close()
        self.__init__(self.path, self.name, self.oracle)

    # --- the link

    def _open(self, deadline: float) -> None:
        """Connect, waiting for a rank that is about to come."""
        began = time.monotonic()
        patience = deadline or began + START_S
        while not self._connect():
            fate = self.oracle(-1)
            if isinstance(fate, Gone) and not fate.replaced:
                raise PeerLost(self.name, fate.cause)
            if time.monotonic() > patience:
                raise DeadlinePassed(f"{self.name} to listen", START_S, hint="its log may say what it does")
            time.sleep(_pause(began))

    def _connect(self) -> bool:
        """Connect if somebody listens.

        Raises:
            PeerLost: it is another user.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.connect(str(self.path))
            pid, owner = peer_credentials(sock)
        except OSError:
            sock.close()
            return False
        if owner != os.getuid():
            sock.close()
            raise PeerLost(self.name, f"{self.path} belongs to user {owner}, not to you")
        with contextlib.suppress(OSError):
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                sock.setsockopt(socket.SOL_SOCKET, option, 1 << 20)
        self._link_pid = pid
        self._reader = Reader(self.name)
        self._unsent = []
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self.sock = sock
        return True

    def _send(self, message: Call, parcel: Parcel | None) -> bool:
        """Send a frame whole; if the socket is full, hear replies until it is not.

        Returns False if the link was gone before any of it was sent: the call can be made again.
        """
        parts, fds = pack(message, parcel)
        sock = self.sock
        if sock is None:
            return True  # Lost together with this call.
        try:
            if not self._unsent and send_some(sock, parts, fds):
                return True
        except OSError:
            again = self.caller.give_up(message.id) is not None
            self._lose(sock)
            return not again
        try:
            self._send_slowly(sock, parts, fds, message.deadline)
        except OSError:
            self._lose(sock)
        return True

    def _send_slowly(
        self, sock: socket.socket, parts: list[bytes | memoryview], fds: list[int], deadline: float
    ) -> None:
        begun = False
        while True:
            if self._unsent:
                if send_some(sock, self._unsent, ()):
                    continue
            elif begun or send_some(sock, parts, fds):
                return
            else:
                self._unsent, begun = parts, True
                continue
            if deadline and time.monotonic() > deadline:
                return  # What is left of the frame goes before the next one; nobody waits for its answer.
            self._await_room(sock)
            if self.sock is not sock:
                return

    def _await_room(self, sock: socket.socket) -> None:
        if (host := context.doing.host) is not None:
            host.serve_while_waiting(sock.fileno(), select.POLLIN | select.POLLOUT, _SILENCE_S, None)
        else:
            poller = select.poll()
            poller.register(sock, select.POLLIN | select.POLLOUT)
            poller.poll(_SILENCE_S * 1000)
        if self._reading.acquire(blocking=False):
            try:
                self._hear(0.0)
            finally:
                self._reading.release()

    def _make_room(self, deadline: float) -> None:
        """Wait until fewer calls are in flight."""
        if deadline and time.monotonic() > deadline:
            raise DeadlinePassed(
                f"room for a call to {self.name}, with {len(self.caller)} unanswered", 0.0, hint=self.busy()
            )
        sock = self.sock
        if sock is None:
            self._open(deadline)
            return
        if self._unsent:
            self._await_room(sock)
            with contextlib.suppress(OSError):
                send_some(sock, self._unsent, ())
        elif not self._pump(_SILENCE_S, None):
            self._check_fate()

    def _hear(self, timeout_s: float) -> bool:
        """Wait for bytes and settle what they answer; False if nothing came. The caller holds `_reading`."""
        sock = self.sock
        if sock is None:
            return True
        if not self._poll.poll(timeout_s * 1000):  # Not in `recv`: an interrupt there would tear the link.
            return False
        try:
            frames = self._reader.read(sock)
        except BlockingIOError:
            return False
        except OSError:
            frames = None
        except BadFrame as error:
            self._lose(sock, str(error))
            return True
        except BaseException:  # An interrupt between reading and remembering: the stream is torn.
            self._lose(sock, "an interrupt tore the link")
            raise
        if frames is None:
            self._lose(sock)
            return True
        if self._unsent and self._lock.acquire(blocking=False):
            try:
                with contextlib.suppress(OSError):
                    send_some(sock, self._unsent, ())
            finally:
                self._lock.release()
        for frame in frames:
            self._take(sock, frame)
        return True

    def _take(self, sock: socket.socket, frame: Frame) -> None:
        message = frame.message
        if isinstance(message, ReplyFrame):
            for number in message.freed:
                ours.returned(number)
            ticket = self.caller.answered(message.generation, message.id)
            if ticket is None:
                return
            if message.kind == STALE:
                ticket.settle(None, PeerLost(self.name, "it was replaced"))
            else:
                ticket.settle(frame, None)
        elif isinstance(message, Hello):
            self._link = message.link
            if not self.caller.greeted(message.generation):
                self._lose(sock, "an old generation answered")

    def _lose(self, sock: socket.socket | None, cause: str = "") -> None:
        """The link is gone: settle all calls on it. Without a `cause` whoever knows is asked."""
        if sock is None or self.sock is not sock:
            return
        self.sock = None
        generation, lost = self.caller.generation, self.caller.lost()
        self._reader.close()
        for loop in list(self._watched):
            loop.remove_reader(sock)
        self._watched.clear()
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)  # Wakes whoever waits for it.
        sock.close()
        if cause or not on_event_loop():
            self._settle_lost(lost, generation, cause)
        else:
            words = (lost, generation, cause)
            threading.Thread(target=self._settle_lost, args=words, name="argosy lost calls", daemon=True).start()

    def _settle_lost(self, lost: Sequence[Ticket], generation: int, cause: str) -> None:
        why = cause or self._cause(generation)
        for ticket in lost:
            ticket.settle(None, PeerLost(self.name, why))
        with self._settled:
            self._settled.notify_all()

    def _cause(self, generation: int) -> str:
        """Ask why the peer is gone, for as long as it takes somebody to know."""
        began = time.monotonic()
        while time.monotonic() < began + CAUSE_S:
            fate = self.oracle(generation)
            if isinstance(fate, Gone):
                self.caller.over(generation)
                return fate.cause
            time.sleep(_pause(began))
        return "it closed the link"

    def _check_fate(self) -> None:
        """After a silence: whether a descendant of a dead rank keeps its socket open."""
        sock, generation = self.sock, self.caller.generation
        fate = self.oracle(generation)
        if isinstance(fate, Gone):
            self.caller.over(generation)
            self._lose(sock, fate.cause)
        elif generation < 0 and not _exists(self._link_pid):
            self._lose(sock, "nobody listens any more")

    def _say_who_is_slow(self, asked_at: float) -> float:
        """Once, after a long silence, tell the user what the call waits for."""
        now = time.monotonic()
        if not asked_at:
            return now
        if asked_at > 0 and now - asked_at > _SLOW_S:
            print(f"argosy: a call waits for {_SLOW_S:g} s: {self.busy()}", file=sys.stderr, flush=True)
            return -1.0
        return asked_at


def _pause(began: float) -> float:
    """How long to sleep between two looks: a twentieth of what has been waited for."""
    return min(0.02, max(0.0002, (time.monotonic() - began) / 20))


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
