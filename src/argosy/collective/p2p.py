"""Point-to-point messages of one group on one host, moved by a thread that serves all peers in turn.

Each pair of ranks has a ring per direction in the receiver's region. A message is a header (tag, length, call site) and
its bytes. The messages of a pair arrive in order; a message whose tag no receive matches is kept on the heap.
"""

import atexit
import ctypes
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from argosy.collective.request import CollectiveMismatch
from argosy.collective.segment import RING_HEADER
from argosy.collective.shared_memory import SharedMemory
from argosy.core import ArgosyError, DeadlinePassed

_MESSAGE = struct.Struct("<qQ16s80s")
_SLEEP_S = 0.02


class P2PMessage:
    """One send or receive: the caller's memory, and a callback. Peer -1 receives from any rank."""

    def __init__(self, peer: int, tag: int, part: tuple[int, int], timeout_s: float) -> None:
        self.peer, self.tag, self.timeout_s = peer, tag, timeout_s
        self.deadline = time.monotonic() + timeout_s
        self.address, self.length = part
        self.moved = 0
        self.begun = False
        self.done: Callable[[BaseException | None], None] = lambda error: None
        self.site = self.dtype = ""


class MessageHeader(NamedTuple):
    """What the sender says about a message."""

    length: int
    dtype: str
    site: str


class _Ring:
    """One direction between two ranks. The sender moves the head, the receiver the tail; both only grow."""

    def __init__(self, engine: SharedMemory, sender: int, receiver: int) -> None:
        address = engine.segment.address + engine.segment.ring_at(sender, receiver)
        self._size = engine.segment.shape.ring
        self._head, self._tail = (ctypes.c_uint64.from_address(address + offset) for offset in (0, 64))
        self._bytes = address + RING_HEADER

    def write(self, address: int, length: int) -> int:
        """Copy as much as fits; returns how much."""
        head, length = self._head.value, min(length, self.room())
        self._copy(head % self._size, length, lambda at, done, part: ctypes.memmove(at, address + done, part))
        self._head.value = head + length
        return length

    def read(self, address: int, length: int) -> int:
        tail, length = self._tail.value, min(length, self.filled())
        self._copy(tail % self._size, length, lambda at, done, part: ctypes.memmove(address + done, at, part))
        self._tail.value = tail + length
        return length

    def room(self) -> int:
        return self._size - self.filled()

    def filled(self) -> int:
        return self._head.value - self._tail.value

    def _copy(self, at: int, length: int, move: Callable[[int, int, int], object]) -> None:
        first = min(length, self._size - at)
        move(self._bytes + at, 0, first)
        if length > first:
            move(self._bytes, first, length - first)


class _Incoming:
    """The state of reading from one sender."""

    def __init__(self, ring: _Ring) -> None:
        self.ring = ring
        self.message: P2PMessage | None = None
        self.tag, self.length, self.moved, self.site, self.dtype = 0, -1, 0, "", ""
        self.aside: bytearray | None = None
        self.kept: deque[tuple[int, bytearray, MessageHeader]] = deque()

    def sent(self) -> "MessageHeader":
        return MessageHeader(self.length, self.dtype, self.site)


class PointToPoint:
    """Sends and receives for one group until it is closed or the group is lost."""

    def __init__(self, engine: SharedMemory) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._sends: dict[int, deque[P2PMessage]] = {}
        self._waiting: list[P2PMessage] = []
        others = range(engine.size)
        self._out = {rank: _Ring(engine, engine.rank, rank) for rank in others}
        self._in = {rank: _Incoming(_Ring(engine, rank, engine.rank)) for rank in others}
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="argosy-p2p", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def _end(self) -> None:
        """The process exits: stop the thread before the modules are torn down."""
        self.close()
        self._thread.join(1.0)

    def send(self, message: P2PMessage) -> None:
        with self._lock:
            self._sends.setdefault(message.peer, deque()).append(message)
        self._engine.segment.ring_doorbell(self._engine.rank)

    def receive(self, message: P2PMessage) -> None:
        with self._lock:
            self._waiting.append(message)
        self._engine.segment.ring_doorbell(self._engine.rank)

    def close(self) -> None:
        atexit.unregister(self._end)
        self._closed = True
        self._engine.segment.ring_doorbell(self._engine.rank)

    def _run(self) -> None:
        segment = self._engine.segment
        while not self._closed:
            heard = segment.doorbell(self._engine.rank)
            try:
                with self._lock:
                    moved = self._push() | self._pull()
                if not moved:
                    self._engine.check()
                    self._check_deadlines()
                    segment.await_doorbell(heard, _SLEEP_S if self._sends or self._waiting else 0.5)
            except ArgosyError as error:
                self._fail_all(error)
                if not isinstance(error, DeadlinePassed):
                    return

    def _push(self) -> bool:
        moved = False
        for peer, messages in list(self._sends.items()):
            ring = self._out[peer]
            while messages:
                message = messages[0]
                if not message.begun:
                    if ring.room() < _MESSAGE.size:
                        break
                    texts = message.dtype.encode(), message.site.encode()[-80:]
                    raw = _MESSAGE.pack(message.tag, message.length, *texts)
                    header = ctypes.create_string_buffer(raw, _MESSAGE.size)
                    ring.write(ctypes.addressof(header), _MESSAGE.size)
                    message.begun = moved = True
                written = ring.write(message.address + message.moved, message.length - message.moved)
                message.moved += written
                moved = moved or written > 0
                if message.moved < message.length:
                    break
                messages.popleft()
                message.done(None)
            if moved:
                self._engine.segment.ring_doorbell(peer)
            if not messages:
                del self._sends[peer]
        return moved

    def _pull(self) -> bool:
        moved = False
        for sender, incoming in self._in.items():
            moved = self._deliver_kept(sender, incoming) or moved
            while self._pull_from(sender, incoming):
                moved = True
        return moved

    def _deliver_kept(self, sender: int, incoming: _Incoming) -> bool:
        """Deliver a kept message to a receive that matches it now."""
        for kept in list(incoming.kept):
            message = self._match(sender, kept[0])
            if message is None:
                continue
            incoming.kept.remove(kept)
            _, memory, sent = kept
            error = self._mismatch(message, sender, sent)
            if error is None and memory:
                ctypes.memmove(message.address, (ctypes.c_char * len(memory)).from_buffer(memory), len(memory))
            message.done(error)
            return True
        return False

    def _pull_from(self, sender: int, incoming: _Incoming) -> bool:
        """Continue to read from one sender; True if bytes moved."""
        ring, moved = incoming.ring, False
        if incoming.length < 0:
            if not self._waiting or ring.filled() < _MESSAGE.size:
                return False
            header = ctypes.create_string_buffer(_MESSAGE.size)
            ring.read(ctypes.addressof(header), _MESSAGE.size)
            incoming.tag, incoming.length, *texts = _MESSAGE.unpack(header.raw)
            incoming.dtype, incoming.site = (text.rstrip(b"\0").decode(errors="replace") for text in texts)
            incoming.moved, moved = 0, True
            incoming.message = self._match(sender, incoming.tag)
            incoming.aside = None
            if incoming.message is None or self._mismatch(incoming.message, sender, incoming.sent()) is not None:
                incoming.aside = bytearray(incoming.length)
        count = incoming.length - incoming.moved
        if count:
            if incoming.aside is not None:
                base = ctypes.addressof(ctypes.c_char.from_buffer(incoming.aside))
            else:
                assert incoming.message is not None
                base = incoming.message.address
            read = ring.read(base + incoming.moved, count)
            incoming.moved += read
            moved = moved or read > 0
        if moved:
            self._engine.segment.ring_doorbell(sender)
        if incoming.moved == incoming.length:
            self._finish_message(sender, incoming)
        return moved

    def _finish_message(self, sender: int, incoming: _Incoming) -> None:
        message, incoming.message = incoming.message, None
        if message is not None:
            message.peer = sender
            message.done(self._mismatch(message, sender, incoming.sent()))
        elif incoming.aside is not None:
            incoming.kept.append((incoming.tag, incoming.aside, incoming.sent()))
        incoming.length, incoming.aside = -1, None

    def _match(self, sender: int, tag: int) -> P2PMessage | None:
        for message in self._waiting:
            if message.peer in (sender, -1) and message.tag == tag:
                self._waiting.remove(message)
                message.peer = sender
                return message
        return None

    def _mismatch(self, message: P2PMessage, sender: int, sent: MessageHeader) -> ArgosyError | None:
        if (message.length, message.dtype) == (sent.length, sent.dtype):
            return None
        what = f"{sent.length} bytes of {sent.dtype} with tag {message.tag} at {sent.site or '?'}"
        return CollectiveMismatch(
            f"{self._engine.name_of(sender)} sent {what}, "
            f"recv at {message.site or '?'} expects {message.length} bytes of {message.dtype}"
        )

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        with self._lock:
            late = [("recv from", message) for message in self._waiting if message.deadline < now]
            sends = [message for messages in self._sends.values() for message in messages]
            late += [("send to", message) for message in sends if message.deadline < now]
        for verb, message in late:
            peer = "any rank" if message.peer < 0 else self._engine.last_of(message.peer)
            what = f"{verb} {peer} of {message.length} bytes with tag {message.tag} at {message.site or '?'}"
            error = self._engine.late(what, message.timeout_s)
            self._engine.abort_late(error)
            raise error

    def _fail_all(self, error: ArgosyError) -> None:
        with self._lock:
            open_ones = [*self._waiting, *(message for messages in self._sends.values() for message in messages)]
            open_ones += [incoming.message for incoming in self._in.values() if incoming.message is not None]
            self._waiting.clear()
            self._sends.clear()
            for incoming in self._in.values():
                incoming.message = None
        for message in open_ones:
            message.done(error)
