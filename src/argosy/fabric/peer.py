"""The calling end of a link to a rank: one socket, shared by all threads of the process.

The thread that waits for a reply reads the socket itself, and settles the replies for other threads that it reads. A
call that cannot be sent at once reads replies meanwhile, so that two ends that both send never wait for each other.
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
from argosy.fabric.calls import AskFate, Caller, Gone
from argosy.fabric.control_socket import explain_silence, send_cancel
from argosy.fabric.deferred_calls import DeferredCalls, on_event_loop
from argosy.fabric.frames import STALE, Call, CallFrame, FrameReader, Greeting, PackedValue, ReplyFrame, pack, send_some
from argosy.fabric.link import BadFrame, enlarge_buffers, peer_credentials
from argosy.fabric.pending_call import PendingCall, context
from argosy.fabric.segments import own_segments

if TYPE_CHECKING:
    import asyncio

CAUSE_S = 2.0
"""How long a caller waits to learn why its peer is gone."""
START_S = 300.0
"""How long a call without a deadline waits for a rank that does not listen yet."""
_SILENCE_S = 1.0
"""After so long without an answer the caller checks whether the peer still lives."""
_SLOW_S = 60.0


class Peer:
    """A rank as this process calls it; all of its generations have the same address."""

    def __init__(self, path: Path, name: str, ask_fate: AskFate) -> None:
        self.path, self.name, self.ask_fate = path, name, ask_fate
        self.caller: Caller[PendingCall] = Caller()
        self.sock: socket.socket | None = None
        self._lock = threading.RLock()
        """Guards the caller and the socket, and is held while a frame is sent."""
        self._reading = threading.Lock()
        self._settled = threading.Condition(threading.Lock())
        self._waiters = 0
        self._reader = FrameReader(name)
        self._poll = select.poll()
        self._unsent: list[bytes | memoryview] = []
        self._link = 0
        self._link_pid = 0
        self._deferred = DeferredCalls()
        self._watched: dict[asyncio.AbstractEventLoop, int] = {}

    # --- calling

    def call(self, packed: PackedValue, actor: str, method: str, deadline: float, wanted: bool) -> PendingCall:
        """Send a call and return it; if sending fails, the error becomes its outcome."""
        pending = PendingCall(self)
        if self._deferred and on_event_loop():
            self._defer(pending, packed, actor, method, deadline, wanted)
        else:
            self._call(pending, packed, actor, method, deadline, wanted)
        return pending

    def _defer(
        self, pending: PendingCall, packed: PackedValue, actor: str, method: str, deadline: float, wanted: bool
    ) -> None:
        self._deferred.add(partial(self._call, pending, packed, actor, method, deadline, wanted), pending, wanted)

    def _call(
        self, pending: PendingCall, packed: PackedValue, actor: str, method: str, deadline: float, wanted: bool
    ) -> None:
        """Send a call; where that would block an event loop, defer it to a thread."""
        lock, caller, body, chain = self._lock, self.caller, packed.body, context.call.chain
        # Another thread may be sending to a rank that does not read.
        if not lock.acquire(False):
            if on_event_loop():
                self._defer(pending, packed, actor, method, deadline, wanted)
                return
            if not lock.acquire(timeout=max(0.0, deadline - time.monotonic()) if deadline else -1):
                why = self.explain_silence()
                pending.settle(None, DeadlinePassed(f"waiting to send a call to {self.name}", 0.0, hint=why))
                return
        try:
            while True:
                sock = self.sock
                if sock is None or caller.is_full:
                    if self._ensure_link(deadline):
                        continue
                    self._defer(pending, packed, actor, method, deadline, wanted)
                    return
                if pending.deferred and not self._deferred.claim(pending):
                    return
                pending.number = number = caller.begin(pending)
                if self.sock is not sock and caller.give_up(number) is not None:
                    continue  # A reader dropped the link before it could see this call.
                freed = self._reader.take_freed() if self._reader.freed else ()
                call = Call(number, caller.generation, actor, method, body, deadline, chain, wanted, freed)
                # If the rank is gone, nothing was sent: the call goes to the next generation.
                if self._send(call, packed):
                    break
            if not wanted:
                caller.give_up(number)
        except ArgosyError as error:
            if not pending.deferred or self._deferred.claim(pending):
                pending.settle(None, error)
        finally:
            lock.release()

    def _ensure_link(self, deadline: float) -> bool:
        """Wait until a link can take a call; False where that would block an event loop."""
        if on_event_loop():
            return self.sock is None and self._connect()
        if self.sock is None:
            self._open(deadline)
        else:
            self._wait_for_slot(deadline)
        return True

    def wait(self, pending: PendingCall, until: float) -> bool:
        """Wait for a call's outcome; False if there is none at `until` (0: wait for ever)."""
        asked_at = 0.0
        while not pending.done:
            left = until - time.monotonic() if until else _SILENCE_S
            if left <= 0:
                return False
            if not self._read_or_wait(min(left, _SILENCE_S), pending) and not pending.done and left >= _SILENCE_S:
                self.check_alive()
                asked_at = self._report_slow(asked_at)
        return True

    def _read_or_wait(self, timeout_s: float, pending: PendingCall | None) -> bool:
        """Read once, or wait for the thread that reads; False if nothing arrived in time."""
        if (server := context.call.server) is not None and (sock := self.sock) is not None:
            if not server.serve_while_waiting(sock.fileno(), select.POLLIN, timeout_s, pending):
                return False
            timeout_s = 0.0
        if self._reading.acquire(blocking=False):
            try:
                return (pending is not None and pending.done) or self._read_replies(timeout_s)
            finally:
                self._reading.release()
                if self._waiters:
                    with self._settled:
                        self._settled.notify_all()
        with self._settled:
            self._waiters += 1
            if pending is None or not pending.done:
                self._settled.wait(min(timeout_s, 0.05))
            self._waiters -= 1
        return True

    def cancel(self, pending: PendingCall, error: ArgosyError) -> bool:
        """Settle a call with `error` and tell the callee; False if it was settled before."""
        if pending.deferred and self._deferred.withdraw(pending, error):
            return True
        link = self._link  # Without the lock: its holder may wait for this very call.
        if self.caller.give_up(pending.number) is not pending:
            return False
        pending.settle(None, error)
        send_cancel(self.path, link, pending.number)
        return True

    def explain_silence(self) -> str:
        """Say in one clause why the rank does not answer."""
        return explain_silence(self.path, self.name)

    def read_now(self) -> None:
        """Read what has arrived, without blocking, unless another thread reads already."""
        if self._reading.acquire(blocking=False):
            try:
                self._read_replies(0.0)
            finally:
                self._reading.release()

    def watch(self, loop: "asyncio.AbstractEventLoop") -> socket.socket | None:
        """Let an event loop read replies while a coroutine awaits one; returns the argument of `unwatch`."""
        sock = self.sock
        if sock is None or sock.fileno() < 0:
            return None
        self._watched[loop] = self._watched.get(loop, 0) + 1
        loop.add_reader(sock, self.read_now)
        return sock

    def unwatch(self, loop: "asyncio.AbstractEventLoop", sock: socket.socket | None) -> None:
        """Undo one `watch`."""
        if sock is None or sock is not self.sock or loop not in self._watched:
            return
        self._watched[loop] -= 1
        if self._watched[loop] <= 0:
            del self._watched[loop]
            loop.remove_reader(sock)

    def close(self, cause: str) -> None:
        """Close the link; calls in flight are lost."""
        self._drop_link(self.sock, cause)

    def forget(self) -> None:
        """In a forked child: the link is the parent's."""
        if self.sock is not None:
            self.sock.close()
        self.__init__(self.path, self.name, self.ask_fate)

    # --- the link

    def _open(self, deadline: float) -> None:
        """Connect, waiting for a rank that is starting.

        Raises:
            PeerLost: the rank is gone and gets no replacement.
            DeadlinePassed: it did not listen in time.
        """
        began = time.monotonic()
        patience = deadline or began + START_S
        while not self._connect():
            fate = self.ask_fate(-1)
            if isinstance(fate, Gone) and not fate.replaced:
                raise PeerLost(self.name, fate.cause)
            if time.monotonic() > patience:
                raise DeadlinePassed(f"waiting for {self.name} to listen", START_S, hint="look at its log")
            time.sleep(_pause(began))

    def _connect(self) -> bool:
        """Connect; False if nothing listens.

        Raises:
            PeerLost: another user listens there.
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
        enlarge_buffers(sock)
        self._link_pid = pid
        self._reader = FrameReader(self.name)
        self._unsent = []
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self.sock = sock
        return True

    def _send(self, message: Call, packed: PackedValue | None) -> bool:
        """Send a whole frame, reading replies while the socket is full.

        Returns False if the link was gone before anything was sent: the call can be made again.
        """
        parts, fds = pack(message, packed)
        sock = self.sock
        if sock is None:
            return True  # The call was lost with the link.
        try:
            if not self._unsent and send_some(sock, parts, fds):
                return True
        except OSError:
            again = self.caller.give_up(message.id) is not None
            self._drop_link(sock)
            return not again
        try:
            self._send_slowly(sock, parts, fds, message.deadline)
        except OSError:
            self._drop_link(sock)
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
                return  # The rest of the frame is sent before the next one; nobody waits for its answer.
            self._wait_writable(sock)
            if self.sock is not sock:
                return

    def _wait_writable(self, sock: socket.socket) -> None:
        if (server := context.call.server) is not None:
            server.serve_while_waiting(sock.fileno(), select.POLLIN | select.POLLOUT, _SILENCE_S, None)
        else:
            poller = select.poll()
            poller.register(sock, select.POLLIN | select.POLLOUT)
            poller.poll(_SILENCE_S * 1000)
        self.read_now()

    def _wait_for_slot(self, deadline: float) -> None:
        if deadline and time.monotonic() > deadline:
            raise DeadlinePassed(
                f"waiting to send a call to {self.name}, with {len(self.caller)} calls unanswered",
                0.0,
                hint=self.explain_silence(),
            )
        sock = self.sock
        if sock is None:
            self._open(deadline)
            return
        if self._unsent:
            self._wait_writable(sock)
            with contextlib.suppress(OSError):
                send_some(sock, self._unsent, ())
        elif not self._read_or_wait(_SILENCE_S, None):
            self.check_alive()

    def _read_replies(self, timeout_s: float) -> bool:
        """Wait for bytes and settle the calls that they answer; False if none arrived. The caller holds `_reading`."""
        sock = self.sock
        if sock is None:
            return True
        if not self._poll.poll(timeout_s * 1000):  # Not in `recv`: an interrupt there would lose bytes.
            return False
        try:
            frames = self._reader.read(sock)
        except BlockingIOError:
            return False
        except OSError:
            frames = None
        except BadFrame as error:
            self._drop_link(sock, str(error))
            return True
        except BaseException:  # An interrupt while reading: bytes may be lost.
            self._drop_link(sock, "an interrupt broke the link")
            raise
        if frames is None:
            self._drop_link(sock)
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

    def _take(self, sock: socket.socket, frame: CallFrame) -> None:
        message = frame.message
        if isinstance(message, ReplyFrame):
            for number in message.freed:
                own_segments.returned(number)
            pending = self.caller.answered(message.generation, message.id)
            if pending is None:
                return
            if message.kind == STALE:
                pending.settle(None, PeerLost(self.name, "it was replaced"))
            else:
                pending.settle(frame, None)
        elif isinstance(message, Greeting):
            self._link = message.link
            if not self.caller.greeted(message.generation):
                self._drop_link(sock, "an old generation answered")

    def _drop_link(self, sock: socket.socket | None, cause: str = "") -> None:
        """Close the link and settle all calls on it; without a `cause`, ask for it first."""
        if sock is None or self.sock is not sock:
            return
        self.sock = None
        generation, lost = self.caller.generation, self.caller.lost()
        self._reader.close()
        for loop in list(self._watched):
            loop.remove_reader(sock)
        self._watched.clear()
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)  # Wakes the threads that wait for it.
        sock.close()
        if cause or not on_event_loop():
            self._settle_lost(lost, generation, cause)
        else:
            arguments = (lost, generation, cause)
            threading.Thread(target=self._settle_lost, args=arguments, name="argosy lost calls", daemon=True).start()

    def _settle_lost(self, lost: Sequence[PendingCall], generation: int, cause: str) -> None:
        why = cause or self._cause(generation)
        for pending in lost:
            pending.settle(None, PeerLost(self.name, why))
        with self._settled:
            self._settled.notify_all()

    def _cause(self, generation: int) -> str:
        """Ask why the peer is gone until there is an answer, CAUSE_S at most."""
        began = time.monotonic()
        while time.monotonic() < began + CAUSE_S:
            fate = self.ask_fate(generation)
            if isinstance(fate, Gone):
                self.caller.over(generation)
                return fate.cause
            time.sleep(_pause(began))
        return "it closed the link"

    def check_alive(self) -> None:
        """After a silence, check whether the rank lives: a descendant of a dead rank may keep its socket open."""
        sock, generation = self.sock, self.caller.generation
        fate = self.ask_fate(generation)
        if isinstance(fate, Gone):
            self.caller.over(generation)
            self._drop_link(sock, fate.cause)
        elif generation < 0 and not os.path.exists(f"/proc/{self._link_pid}"):
            self._drop_link(sock, "its process is gone")

    def _report_slow(self, asked_at: float) -> float:
        """After a long silence, tell the user once what the call waits for."""
        now = time.monotonic()
        if not asked_at:
            return now
        if asked_at > 0 and now - asked_at > _SLOW_S:
            print(f"argosy: a call has waited {_SLOW_S:g} s: {self.explain_silence()}", file=sys.stderr, flush=True)
            return -1.0
        return asked_at


def _pause(began: float) -> float:
    """How long to sleep between two polls: a twentieth of the time waited so far."""
    return min(0.02, max(0.0002, (time.monotonic() - began) / 20))
