"""The called end of links: one loop reads calls and runs their endpoints, one after another, on the same thread.

While an endpoint waits for a reply, the loop serves calls of the same chain, so that actors may call each other in a
circle; other calls wait for their turn. Concurrent endpoints run on threads of a pool, and the loop then reads on a
thread of its own. The control socket is served by another thread, so that it answers while the loop is busy.

V1  Bytes that are not a frame end the link that they came from, and affect nothing else.
V2  No caller can block the loop: replies that it does not read are queued; beyond a bound its calls are not read.
"""

import atexit
import contextlib
import ctypes
import itertools
import os
import select
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import msgspec

from argosy.core import ArgosyError
from argosy.fabric.calls import Callee
from argosy.fabric.control_socket import AskCurrentCall, CancelCall, CurrentCall, control_decoder, control_path
from argosy.fabric.frames import (
    CANCELLED,
    RAISED,
    RESULT,
    Body,
    Call,
    CallFrame,
    FrameReader,
    Greeting,
    PackedValue,
    ReplyFrame,
    pack,
    send_some,
)
from argosy.fabric.link import BadFrame, Link, accept, enlarge_buffers, listen, peer_credentials
from argosy.fabric.pending_call import CallContext, PendingCall, context
from argosy.fabric.remote_errors import Cancelled, pack_error
from argosy.fabric.segments import own_segments

CANCEL_SIGNAL = signal.SIGRTMIN + 11
UNSENT_BYTES_MAX = 64 << 20
THREADS_MAX = 64
_READ_EVERY_S = 0.001
_NOTHING = Body()
_IN, _OUT, _END = int(select.EPOLLIN), int(select.EPOLLOUT), int(select.EPOLLIN | select.EPOLLHUP)
_interrupting = threading.Lock()


class CallHandler(Protocol):
    """Runs the endpoints of a server."""

    def is_concurrent(self, call: Call) -> bool: ...
    def perform(self, call: Call, frame: CallFrame) -> object: ...


class Connection:
    """The link to one caller."""

    def __init__(self, sock: socket.socket, number: int, generation: int) -> None:
        self.sock, self.number = sock, number
        self.pid = peer_credentials(sock)[0]
        self.reader = FrameReader(f"pid {self.pid}")
        self.callee = Callee(generation)
        self.lock = threading.Lock()
        self.unsent: deque[tuple[list[bytes | memoryview], list[int], int]] = deque()
        self.unsent_bytes = 0
        self.events = select.EPOLLIN
        self.lent: list[int] = []
        self.closed = False

    def send(self, message: Greeting | ReplyFrame, packed: PackedValue | None = None) -> None:
        """Send, or queue what the socket does not accept now."""
        parts, fds = pack(message, packed)
        with self.lock:
            if self.closed:
                return
            try:
                if not self.unsent and send_some(self.sock, parts, fds):
                    return
            except OSError:
                return  # The next read notices that the link is gone.
            begun = not self.unsent and len(parts) > 0 and isinstance(parts[0], memoryview)
            size = sum(memoryview(part).nbytes for part in parts)
            self.unsent.append((parts, [] if begun else fds, size))
            self.unsent_bytes += size

    def flush(self) -> None:
        """Send queued frames until the socket is full."""
        with self.lock:
            while self.unsent:
                parts, fds, size = self.unsent[0]
                whole = len(parts)
                if not send_some(self.sock, parts, fds):
                    if len(parts) < whole or isinstance(parts[0], memoryview):
                        self.unsent[0] = (parts, [], size)
                    return
                self.unsent.popleft()
                self.unsent_bytes -= size


class RunningCall(msgspec.Struct, eq=False):
    """An endpoint that runs; it can be interrupted while `open`, at most once."""

    connection: Connection
    call: Call
    since: float
    thread: int
    open: bool = False
    cancelled: bool = False

    def interrupt(self) -> None:
        """Raise `Cancelled` in the endpoint from another thread, unless it has just ended."""
        with _interrupting:
            if self.open:
                _raise_in(self.thread, Cancelled)

    def close(self) -> None:
        """The endpoint has ended: revoke an interrupt that was not raised yet."""
        with _interrupting:
            _raise_in(self.thread, None)


class Server:
    """The listening end of a rank; calls of one caller run in order."""

    def __init__(self, path: Path, generation: int, handler: CallHandler) -> None:
        self.path, self.generation, self._handler = path, generation, handler
        self._pid = os.getpid()
        self._links: dict[int, Connection] = {}
        self._numbers: dict[int, Connection] = {}
        self._count = 0
        self._queue: deque[tuple[Connection, CallFrame]] = deque()
        self._serial: RunningCall | None = None
        self._concurrent: dict[tuple[int, int], RunningCall] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._handed: deque[tuple[Connection, CallFrame]] = deque()
        self._wake = threading.Semaphore(0)
        self._threaded = False
        self._chains = itertools.count(1)
        self.stopped = False
        self._in_main = threading.current_thread() is threading.main_thread()
        if self._in_main:
            signal.signal(CANCEL_SIGNAL, self._interrupted)
        self._control = listen(control_path(path))
        self._listener = listen(path)
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self._end)
        threading.Thread(target=self._serve_control, name="argosy control", daemon=True).start()

    # --- the loop

    def loop(self) -> None:
        """Read and run calls on this thread; once there are concurrent endpoints, read on another one."""
        while not self.stopped:
            if self._threaded:
                threading.Thread(target=self._read_on, name="argosy calls", daemon=True).start()
                self._work()
                return
            self._turn(-1)
            while self._queue and not self.stopped and not self._threaded:
                began = time.monotonic()
                self._run(*self._queue.popleft())
                if self._queue and time.monotonic() - began > _READ_EVERY_S:
                    self._turn(0)  # A caller may be gone: then its calls are not run.

    def want_threads(self) -> None:
        """Allow concurrent endpoints from now on."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="argosy endpoint")
            self._threaded = True

    def serve_while_waiting(self, fd: int, events: int, timeout_s: float, pending: PendingCall | None) -> bool:
        """Wait until `fd` is ready or `pending` is done, for the endpoint that runs, and serve its chain meanwhile.

        Returns False if neither happened in time.
        """
        until = time.monotonic() + timeout_s
        try:
            self._epoll.register(fd, events)
        except FileExistsError:  # An outer endpoint waits for the same descriptor.
            fresh = False
        else:
            fresh = True
        try:
            while (left := until - time.monotonic()) > 0:
                if fd in self._turn(left, during=self._serial) or (pending is not None and pending.done):
                    return True
        finally:
            if fresh:
                with contextlib.suppress(OSError):
                    self._epoll.unregister(fd)
        return False

    def _read_on(self) -> None:
        while not self.stopped:
            self._turn(-1)
            while self._queue:
                self._handed.append(self._queue.popleft())
                self._wake.release()

    def _work(self) -> None:
        while not self.stopped:
            self._wake.acquire()
            if self._handed:
                self._run(*self._handed.popleft())

    def _turn(self, timeout_s: float, during: RunningCall | None = None) -> list[int]:
        """Serve the sockets that are ready; returns the ready descriptors that belong to others."""
        others: list[int] = []
        for fd, event in self._epoll.poll(timeout_s):
            if self.stopped:
                break
            connection = self._links.get(fd)
            if connection is not None:
                self._serve(connection, event, during)
            elif fd == self._listener.fileno():
                self._accept()
            else:
                others.append(fd)
        return others

    def _accept(self) -> None:
        try:
            sock = accept(self._listener)
        except OSError:
            return
        if sock is None:
            return
        sock.setblocking(False)
        enlarge_buffers(sock)
        self._count += 1
        connection = Connection(sock, self._count, self.generation)
        self._links[sock.fileno()] = self._numbers[self._count] = connection
        self._epoll.register(sock, select.EPOLLIN)
        connection.send(Greeting(self.generation, self._count))

    def _serve(self, connection: Connection, event: int, during: RunningCall | None) -> None:
        try:
            if event != _IN:
                if event & _OUT:
                    connection.flush()
                    self._adjust(connection)
                if not event & _END:
                    return
            frames = connection.reader.read(connection.sock)
        except BlockingIOError:
            return
        except (OSError, BadFrame):  # V1
            frames = None
        if frames is None:
            self._drop(connection)
            return
        for frame in frames:
            if isinstance(frame.message, Call) and connection.callee.arrived(frame.message):
                self._arrived(connection, frame, frame.message, during)

    def _arrived(self, connection: Connection, frame: CallFrame, call: Call, during: RunningCall | None) -> None:
        for number in call.freed:
            own_segments.returned(number)
            if number in connection.lent:
                connection.lent.remove(number)
        nested = call.chain and self._serial is not None and call.chain == self._serial_chain
        if self._pool is not None and (nested or self._handler.is_concurrent(call)):
            self._pool.submit(self._run_concurrently, connection, frame)
        elif nested and during is not None:
            self._run(connection, frame)
        else:
            self._queue.append((connection, frame))

    def _adjust(self, connection: Connection) -> None:
        """Update what the loop polls this connection for (V2)."""
        crowded = connection.unsent_bytes > UNSENT_BYTES_MAX
        events = (0 if crowded else select.EPOLLIN) | (select.EPOLLOUT if connection.unsent else 0)
        if events != connection.events and not connection.closed:
            connection.events = events
            self._epoll.modify(connection.sock, events)

    def _drop(self, connection: Connection) -> None:
        if connection.closed:
            return
        with connection.lock:
            connection.closed = True
        del self._links[connection.sock.fileno()]
        self._numbers.pop(connection.number, None)
        connection.sock.close()
        connection.reader.close()
        for number in connection.lent:
            own_segments.returned(number)

    # --- running endpoints

    _serial_chain = 0

    def _run(self, connection: Connection, frame: CallFrame) -> None:
        """Run a serial endpoint on this thread, nested in one of the same chain if that waits."""
        call = frame.message
        assert isinstance(call, Call)
        outer, chain, before = self._serial, self._serial_chain, context.call
        self._serial = running = RunningCall(connection, call, time.monotonic(), threading.get_ident())
        self._serial_chain = call.chain or self._new_chain()
        context.call = CallContext(self._serial_chain, call.deadline, None if self._threaded else self)
        try:
            self._perform(running, frame)
        finally:
            self._serial, self._serial_chain = outer, chain
            context.call = before

    def _new_chain(self) -> int:
        """Return a number that is unique on this host."""
        return self._pid << 32 | next(self._chains)

    def _run_concurrently(self, connection: Connection, frame: CallFrame) -> None:
        call = frame.message
        assert isinstance(call, Call)
        running = RunningCall(connection, call, time.monotonic(), threading.get_ident())
        self._concurrent[connection.number, call.id] = running
        context.call = CallContext(call.chain or self._new_chain(), call.deadline)
        try:
            self._perform(running, frame)
        except BaseException as error:  # SystemExit ends the rank, as it does on the main thread.
            os._exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1)
        finally:
            self._concurrent.pop((connection.number, call.id), None)

    def _perform(self, running: RunningCall, frame: CallFrame) -> None:
        connection, call = running.connection, running.call
        if connection.closed and call.wanted:
            return  # The caller is gone.
        kind = connection.callee.admit(call, time.monotonic())
        value: object = None
        if kind is None:
            try:
                running.open = True
                try:
                    value = self._handler.perform(call, frame)
                    kind = RESULT
                finally:
                    running.open = False
                    if running.cancelled:
                        running.close()
            except Cancelled:
                kind = CANCELLED
            except Exception as error:
                kind, value = RAISED, pack_error(error)
        if self.stopped and os.getpid() != self._pid:
            os._exit(0)  # A child that an endpoint forked returned from it instead of exiting.
        if call.wanted:
            self._reply(connection, call, kind, value)

    def _reply(self, connection: Connection, call: Call, kind: int, value: object) -> None:
        packed: PackedValue | None = None
        if kind in (RESULT, RAISED):
            try:
                packed = PackedValue(value)
            except ArgosyError as error:
                error.add_note(f"the result of {call.actor}.{call.method}")
                kind, packed = RAISED, PackedValue(pack_error(error))
        del value
        freed = connection.reader.take_freed() if connection.reader.freed else ()
        body = packed.body if packed is not None else _NOTHING
        if body.segment:
            connection.lent.append(body.segment)
        connection.send(ReplyFrame(call.id, self.generation, kind, body, freed), packed)
        if connection.unsent:
            self._adjust(connection)

    # --- the control socket

    def _serve_control(self) -> None:
        """Cancel calls and report what runs, until the server stops."""
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        while not self.stopped:
            try:
                poller.poll(1000)
                if self.stopped:
                    return
                sock = accept(self._control)
            except (OSError, ValueError):
                if self.stopped or self._control.fileno() < 0:
                    return
                time.sleep(0.05)
                continue
            if sock is None:
                continue
            link = Link(sock, control_decoder, "a caller")
            try:
                message, _ = link.wait(1.0)
                if isinstance(message, CancelCall):
                    self._cancel(message)
                else:
                    assert isinstance(message, AskCurrentCall)
                    link.send(self._current_call())
            except ArgosyError:
                pass
            finally:
                link.close()

    def _current_call(self) -> CurrentCall:
        running = self._serial
        if running is None:
            running = next(iter(list(self._concurrent.values())), None)
        waiting = len(self._queue) + len(self._handed)
        if running is None:
            return CurrentCall("", 0.0, waiting)
        name = f"{running.call.actor}.{running.call.method}" if running.call.actor else running.call.method
        return CurrentCall(name, time.monotonic() - running.since, waiting)

    def _cancel(self, message: CancelCall) -> None:
        connection = self._numbers.get(message.link)
        if connection is None:
            return
        connection.callee.cancel(message.number)
        running = self._concurrent.get((message.link, message.number))
        serial = self._serial
        if serial is not None and serial.connection is connection and serial.call.id == message.number:
            running = serial
        if running is None or running.cancelled:
            return
        running.cancelled = True
        if running is serial and self._in_main:
            signal.pthread_kill(running.thread, CANCEL_SIGNAL)  # Interrupts a sleep or a read, too.
        else:
            running.interrupt()

    def _interrupted(self, _number: int, _frame: FrameType | None) -> None:
        running = self._serial
        if running is not None and running.cancelled and running.open:
            running.open = False
            raise Cancelled

    def _end(self) -> None:
        """The process exits: its modules are torn down while threads of the server still run."""
        self.stopped = True

    def _forget(self) -> None:
        """In a child that an endpoint forked: close the parent's sockets."""
        if os.getpid() == self._pid:
            return
        self.stopped = True
        for sock in (self._listener, self._control, *(connection.sock for connection in self._links.values())):
            sock.close()
        for connection in self._links.values():
            connection.closed = True
        self._epoll.close()


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Make a thread raise an error at its next instruction; None revokes one that was not raised yet."""
    set_exception: Callable[..., Any] = ctypes.pythonapi.PyThreadState_SetAsyncExc
    set_exception(ctypes.c_ulong(thread), None if error is None else ctypes.py_object(error))
