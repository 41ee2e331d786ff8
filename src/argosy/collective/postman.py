"""Point-to-point messages of one group: a thread that never waits for one peer while another could go on.

Each pair of ranks has a ring per direction in the receiver's region. A message is a header (tag, length, call site) and
its bytes. Messages of a pair arrive in order; one whose tag nobody waits for is kept aside on the heap.
"""

import atexit
import ctypes
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from argosy.collective.engine import Engine
from argosy.collective.segment import RING_HEADER
from argosy.collective.wire import CollectiveMismatch
from argosy.core import ArgosyError, DeadlinePassed

_MESSAGE = struct.Struct("<qQ16s80s")
_SLEEP_S = 0.02


class Letter:
    """One send or receive: memory of the caller, and whom to tell. Peer -1 receives from anybody."""

    def __init__(self, peer: int, tag: int, part: tuple[int, int], timeout_s: float) -> None:
        self.peer, self.tag, self.timeout_s = peer, tag, timeout_s
        self.deadline = time.monotonic() + timeout_s
        self.address, self.length = part
        self.moved = 0
        self.begun = False
        self.done: Callable[[BaseException | None], None] = lambda error: None
        self.site = self.dtype = ""

    def finish(self, error: BaseException | None = None) -> None:
        self.done(error)


class Sent(NamedTuple):
    """What a message says of itself."""

    length: int
    dtype: str
    site: str


class _Ring:
    """One direction between two ranks. Head is the sender's, tail the receiver's, both only grow."""

    def __init__(self, engine: Engine, sender: int, receiver: int) -> None:
        segment = engine.segment
        at = segment.ring_at(sender, receiver)
        self._view, self._at, self._size = segment.view, at, segment.shape.ring
        self._head, self._tail = (
            ctypes.c_uint64.from_address(segment.address + at),
            ctypes.c_uint64.from_address(segment.address + at + 64),
        )
        self._bytes = segment.address + at + RING_HEADER

    def write(self, address: int, length: int) -> int:
        """Copy as much as there is room for; returns how much."""
        head = self._head.value
        length = min(length, self._size - (head - self._tail.value))
        self._copy(head % self._size, length, lambda at, done, part: ctypes.memmove(at, address + done, part))
        self._head.value = head + length
        return length

    def read(self, address: int, length: int) -> int:
        tail = self._tail.value
        length = min(length, self._head.value - tail)
        self._copy(tail % self._size, length, lambda at, done, part: ctypes.memmove(address + done, at, part))
        self._tail.value = tail + length
        return length

    def room(self) -> int:
        return self._size - (self._head.value - self._tail.value)

    def filled(self) -> int:
        return self._head.value - self._tail.value

    def _copy(self, at: int, length: int, move: Callable[[int, int, int], object]) -> None:
        first = min(length, self._size - at)
        move(self._bytes + at, 0, first)
        if length > first:
            move(self._bytes, first, length - first)


class _Incoming:
    """What is being read from one sender."""

    def __init__(self, ring: _Ring) -> None:
        self.ring = ring
        self.letter: Letter | None = None
        self.tag, self.length, self.moved, self.site, self.dtype = 0, -1, 0, "", ""
        self.aside: bytearray | None = None
        self.kept: deque[tuple[int, bytearray, Sent]] = deque()

    def sent(self) -> "Sent":
        return Sent(self.length, self.dtype, self.site)


class Postman:
    """Delivers for one group until it is closed or the group breaks."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._sends: dict[int, deque[Letter]] = {}
        self._waiting: list[Letter] = []
        others = range(engine.size)
        self._out = {rank: _Ring(engine, engine.rank, rank) for rank in others}
        self._in = {rank: _Incoming(_Ring(engine, rank, engine.rank)) for rank in others}
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="argosy-postman", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def _end(self) -> None:
        """The process ends: nothing of this may run while its modules are taken apart."""
        self.close()
        self._thread.join(1.0)

    def send(self, letter: Letter) -> None:
        with self._lock:
            self._sends.setdefault(letter.peer, deque()).append(letter)
        self._engine.segment.ring_doorbell(self._engine.rank)

    def receive(self, letter: Letter) -> None:
        with self._lock:
            self._waiting.append(letter)
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
        for peer, letters in list(self._sends.items()):
            ring = self._out[peer]
            while letters:
                letter = letters[0]
                if not letter.begun:
                    if ring.room() < _MESSAGE.size:
                        break
                    words = _MESSAGE.pack(letter.tag, letter.length, letter.dtype.encode(), letter.site.encode()[-80:])
                    header = ctypes.create_string_buffer(words, _MESSAGE.size)
                    ring.write(ctypes.addressof(header), _MESSAGE.size)
                    letter.begun = moved = True
                written = ring.write(letter.address + letter.moved, letter.length - letter.moved)
                letter.moved += written
                moved = moved or written > 0
                if letter.moved < letter.length:
                    break
                letters.popleft()
                letter.finish()
            if moved:
                self._engine.segment.ring_doorbell(peer)
            if not letters:
                del self._sends[peer]
        return moved

    def _pull(self) -> bool:
        moved = False
        for sender, incoming in self._in.items():
            moved = self._hand_kept(sender, incoming) or moved
            while self._pull_from(sender, incoming):
                moved = True
        return moved

    def _hand_kept(self, sender: int, incoming: _Incoming) -> bool:
        """Give messages that were put aside to those who ask for them now."""
        for kept in list(incoming.kept):
            letter = self._match(sender, kept[0])
            if letter is None:
                continue
            incoming.kept.remove(kept)
            _, memory, sent = kept
            error = self._fits(letter, sender, sent)
            if error is None and memory:
                ctypes.memmove(letter.address, (ctypes.c_char * len(memory)).from_buffer(memory), len(memory))
            letter.finish(error)
            return True
        return False

    def _pull_from(self, sender: int, incoming: _Incoming) -> bool:
        """Read on from one sender; True if anything moved."""
        ring, moved = incoming.ring, False
        if incoming.length < 0:
            if not self._waiting or ring.filled() < _MESSAGE.size:
                return False
            header = ctypes.create_string_buffer(_MESSAGE.size)
            ring.read(ctypes.addressof(header), _MESSAGE.size)
            incoming.tag, incoming.length, *texts = _MESSAGE.unpack(header.raw)
            incoming.dtype, incoming.site = (text.rstrip(b"\0").decode(errors="replace") for text in texts)
            incoming.moved, moved = 0, True
            incoming.letter = self._match(sender, incoming.tag)
            incoming.aside = None
            if incoming.letter is None or self._fits(incoming.letter, sender, incoming.sent()) is not None:
                incoming.aside = bytearray(incoming.length)
        count = incoming.length - incoming.moved
        if count:
            if incoming.aside is not None:
                base = ctypes.addressof(ctypes.c_char.from_buffer(incoming.aside))
            else:
                assert incoming.letter is not None
                base = incoming.letter.address
            read = ring.read(base + incoming.moved, count)
            incoming.moved += read
            moved = moved or read > 0
        if moved:
            self._engine.segment.ring_doorbell(sender)
        if incoming.moved == incoming.length:
            self._close_letter(sender, incoming)
        return moved

    def _close_letter(self, sender: int, incoming: _Incoming) -> None:
        letter, incoming.letter = incoming.letter, None
        if letter is not None:
            letter.peer = sender
            letter.finish(self._fits(letter, sender, incoming.sent()))
        elif incoming.aside is not None:
            incoming.kept.append((incoming.tag, incoming.aside, incoming.sent()))
        incoming.length, incoming.aside = -1, None

    def _match(self, sender: int, tag: int) -> Letter | None:
        for letter in self._waiting:
            if letter.peer in (sender, -1) and letter.tag == tag:
                self._waiting.remove(letter)
                letter.peer = sender
                return letter
        return None

    def _fits(self, letter: Letter, sender: int, sent: Sent) -> ArgosyError | None:
        if (letter.length, letter.dtype) == (sent.length, sent.dtype):
            return None
        what = f"{sent.length} bytes of {sent.dtype} with tag {letter.tag} at {sent.site or '?'}"
        return CollectiveMismatch(
            f"{self._engine.name_of(sender)} sent {what}, "
            f"recv at {letter.site or '?'} expects {letter.length} of {letter.dtype}"
        )

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        with self._lock:
            late = [("recv from", letter) for letter in self._waiting if letter.deadline < now]
            sends = [letter for letters in self._sends.values() for letter in letters]
            late += [("send to", letter) for letter in sends if letter.deadline < now]
        for verb, letter in late:
            peer = "any rank" if letter.peer < 0 else self._engine.last_of(letter.peer)
            what = f"{verb} {peer} of {letter.length} bytes with tag {letter.tag} at {letter.site or '?'}"
            error = self._engine.late(what, letter.timeout_s)
            self._engine.abort_late(error)
            raise error

    def _fail_all(self, error: ArgosyError) -> None:
        with self._lock:
            open_ones = [*self._waiting, *(letter for letters in self._sends.values() for letter in letters)]
            open_ones += [incoming.letter for incoming in self._in.values() if incoming.letter is not None]
            self._waiting.clear()
            self._sends.clear()
            for incoming in self._in.values():
                incoming.letter = None
        for letter in open_ones:
            letter.finish(error)
