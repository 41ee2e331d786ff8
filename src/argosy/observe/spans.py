"""Spans: timed pieces of a rank's work, in a ring of shared memory that survives kill -9 and can be read at any time.

The ring is lossy: new records overwrite the oldest. One file per rank: a header of 4096 bytes, then records of 32
bytes. Header, in little-endian 64-bit words: magic and version, pid, capacity, records written so far, names; from
byte 256 on the names, 32 bytes each. A record: time (CLOCK_MONOTONIC ns); number of the name and, from bit 32 on,
kind (1 begins, 2 ends); a reserved word; low half of its number + 1 and, from bit 32 on, the step.

R1  A reader skips records that were overwritten or being written while it read.
R2  A full /dev/shm is an OSError at creation, never a SIGBUS in the training.
R3  A forked child does not write to its parent's ring.
"""

import mmap
import os
import struct
import time
from threading import RLock

import msgspec

from argosy.observe.page import detached_in_child, map_new

HEADER_BYTES = 4096
RECORD_BYTES = 32
CAPACITY = 4096
NAMES_MAX = (HEADER_BYTES - 256) // 32
_MAGIC = int.from_bytes(b"ARGSPAN\x01", "little")
_PID, _CAPACITY, _HEAD, _NAMES = range(1, 5)
_BEGIN, _END = 1, 2
_LOW = 0xFFFFFFFF
_RECORD = struct.Struct("<4Q")
_FIRST = HEADER_BYTES // 8


class Span(msgspec.Struct, frozen=True):
    """A piece of work; times in CLOCK_MONOTONIC ns, `end` is 0 while it runs."""

    name: str
    begin: int
    end: int = 0
    step: int = 0

    @property
    def seconds(self) -> float:
        """How long it took; 0 while it runs."""
        return max(0, self.end - self.begin) / 1e9


class Ring:
    """A mapped ring. Only the rank writes, from any of its threads."""

    def __init__(self, memory: mmap.mmap | bytearray) -> None:
        self._view = memoryview(memory)
        self._words = self._view.cast("Q")
        self._lock = RLock()  # Re-entrant: a signal handler may record, too.
        self._numbers: dict[str, int] = {}
        self._capacity = (len(self._view) - HEADER_BYTES) // RECORD_BYTES
        self._head = 0
        detached_in_child.add(self)  # R3

    @classmethod
    def create(cls, path: str | os.PathLike[str], capacity: int = CAPACITY) -> "Ring":
        """Make the file and map it.

        Raises:
            OSError: the file exists, no space, or no permission; no file is left.
        """
        ring = cls(map_new(path, HEADER_BYTES + capacity * RECORD_BYTES))  # R2
        ring._words[_PID], ring._words[_CAPACITY] = os.getpid(), capacity
        ring._words[0] = _MAGIC
        return ring

    @classmethod
    def void(cls) -> "Ring":
        """A ring that nobody sees."""
        return cls(bytearray(HEADER_BYTES + RECORD_BYTES))

    def detach(self) -> None:
        """Release the shared memory: later records are lost."""
        self.__init__(bytearray(HEADER_BYTES + RECORD_BYTES))

    def begin(self, name: str, step: int = 0) -> None:
        self._record(name, _BEGIN, step)

    def end(self, name: str, step: int = 0) -> None:
        self._record(name, _END, step)

    def _record(self, name: str, kind: int, step: int) -> None:
        with self._lock:
            number = self._numbers.get(name)
            if number is None:
                number = self._add_name(name)
            head, words = self._head, self._words
            at = _FIRST + head % self._capacity * 4
            words[at + 3] = 0
            words[at] = time.monotonic_ns()
            words[at + 1] = number | kind << 32
            words[at + 3] = ((head + 1) & _LOW) | (step & _LOW) << 32
            self._head = words[_HEAD] = head + 1

    def _add_name(self, name: str) -> int:
        number = min(len(self._numbers), NAMES_MAX - 1)
        raw = name.encode()[:32]
        self._view[256 + number * 32 : 288 + number * 32] = raw.ljust(32, b"\0")
        self._numbers[name] = number
        self._words[_NAMES] = number + 1
        return number


def read_spans(path: str | os.PathLike[str]) -> list[Span]:
    """Return the spans that the ring still holds, oldest first; the last ones may still run.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not a ring of spans.
    """
    with open(path, "rb") as file:
        first = file.read(HEADER_BYTES)
        body = file.read()
        file.seek(0)
        after = file.read(HEADER_BYTES)
    words = struct.unpack_from("<5Q", first)
    if words[0] != _MAGIC or len(body) < words[_CAPACITY] * RECORD_BYTES:
        raise ValueError(f"not a ring of spans: {os.fspath(path)}")
    capacity, head = words[_CAPACITY], words[_HEAD]
    oldest = struct.unpack_from("<5Q", after)[_HEAD] - capacity
    spans: list[Span] = []
    running: list[int] = []
    for number in range(max(0, oldest + 1, head - capacity), head):
        at, what, _, sequence = _RECORD.unpack_from(body, number % capacity * RECORD_BYTES)
        if sequence & _LOW != (number + 1) & _LOW:  # R1
            continue
        name = _name(after, what & _LOW)
        if what >> 32 == _BEGIN:
            running.append(len(spans))
            spans.append(Span(name, at, 0, sequence >> 32))
            continue
        mine = next((place for place in reversed(running) if spans[place].name == name), None)
        if mine is not None:
            running.remove(mine)
            spans[mine] = Span(name, spans[mine].begin, at, spans[mine].step)
    return spans


def _name(header: bytes, number: int) -> str:
    start = 256 + min(number, NAMES_MAX - 1) * 32
    return header[start : start + 32].rstrip(b"\0").decode(errors="replace")


_ring = Ring.void()


def record_spans(ring: Ring) -> None:
    """Record the spans of this process in `ring` from now on."""
    global _ring
    _ring = ring


class span:  # A function in all but name: `with span("data"):`.
    """Record how long the block takes, in the ring of this rank if it has one."""

    __slots__ = ("_name", "_step")

    def __init__(self, name: str, step: int = 0) -> None:
        self._name, self._step = name, step

    def __enter__(self) -> None:
        _ring.begin(self._name, self._step)

    def __exit__(self, *_: object) -> None:
        _ring.end(self._name, self._step)
