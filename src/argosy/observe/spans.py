"""Spans: timed pieces of a rank's work, in a ring of shared memory that survives kill -9 and can be read at any time.

The ring is lossy: new records overwrite the oldest. One file per rank: a header of 4096 bytes, then records of 32
bytes. Header, in little-endian 64-bit words: magic and version, pid, capacity, records written so far, names, and the
same moment on two clocks: CLOCK_REALTIME and CLOCK_MONOTONIC in ns; a request of another process (the only word that
others write); from byte 256 on the names, 32 bytes each.
A record: time (CLOCK_MONOTONIC ns); number of the name, kind (`SpanKind`, from bit 32), lane (of the thread, from
bit 40 on); an argument; low half of its number + 1 and, from bit 32 on, the step.

R1  A reader skips records that were overwritten or being written while it read.
R2  A full /dev/shm is an OSError at creation, never a SIGBUS in the training.
R3  A forked child does not write to its parent's ring.
"""

import ctypes
import mmap
import os
import struct
import time
from collections.abc import Callable
from enum import IntEnum
from functools import wraps
from typing import Any, TypeVar, cast

import msgspec

from argosy._select import native
from argosy.observe.page import detached_in_child, map_new
from argosy.observe.thread_clock import STEP_CPU, STEP_DELAY, THREADS_CPU, ThreadClock, other_threads_cpu_ns

HEADER_BYTES = 4096
RECORD_BYTES = 32
CAPACITY = 16384
NAMES_MAX = (HEADER_BYTES - 256) // 32
OTHER_NAMES = "(other names)"
"""Stands for all names after the first NAMES_MAX - 1."""
MAGIC = int.from_bytes(b"ARGSPAN\x02", "little")
_PID, _CAPACITY, _HEAD, _NAMES, _WALL, _MONOTONIC, REQUEST = range(1, 8)
THREADS_S = 1.0
_threads_at = 0.0
_thread = ThreadClock()
F = TypeVar("F")
record_span = native.record_span
_LOW = 0xFFFFFFFF
HEADER = struct.Struct("<7Q")


class SpanKind(IntEnum):
    """What a record says."""

    BEGIN = 1
    END = 2
    POINT = 3
    """Something happened: the argument says more."""
    COUNT = 4
    """A counter has the value of the argument (a signed integer)."""


_BEGIN, _END, _POINT, _COUNT = (int(kind) for kind in SpanKind)


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
        self._pin = ctypes.c_char.from_buffer(memory)
        self.address = ctypes.addressof(self._pin)
        self._numbers: dict[str, int] = {}
        self.step = 0
        """The step that records belong to if the caller names none."""
        detached_in_child.add(self)  # R3

    @classmethod
    def create(cls, path: str | os.PathLike[str], capacity: int = CAPACITY) -> "Ring":
        """Make the file and map it.

        Raises:
            OSError: the file exists, no space, or no permission; no file is left.
        """
        ring = cls(map_new(path, HEADER_BYTES + capacity * RECORD_BYTES))  # R2
        ring._words[_PID], ring._words[_CAPACITY] = os.getpid(), capacity
        ring._words[_WALL], ring._words[_MONOTONIC] = time.time_ns(), time.monotonic_ns()
        ring._words[0] = MAGIC
        return ring

    @classmethod
    def void(cls) -> "Ring":
        """A ring that nobody sees."""
        return cls(bytearray(HEADER_BYTES + RECORD_BYTES))

    def detach(self) -> None:
        """Release the shared memory: later records are lost."""
        self.__init__(bytearray(HEADER_BYTES + RECORD_BYTES))

    @property
    def requested(self) -> int:
        """What another process asks for: see `profile_request`; 0: nothing."""
        return self._words[REQUEST]

    @requested.setter
    def requested(self, value: int) -> None:
        self._words[REQUEST] = value

    def begin(self, name: str, step: int | None = None, argument: int = 0) -> None:
        self._record(name, _BEGIN << 32, step, argument)

    def end(self, name: str, step: int | None = None, argument: int = 0) -> None:
        self._record(name, _END << 32, step, argument)

    def point(self, name: str, step: int | None = None, argument: int = 0) -> None:
        self._record(name, _POINT << 32, step, argument)

    def counter(self, name: str, value: int) -> None:
        self._record(name, _COUNT << 32, None, value & 0xFFFFFFFFFFFFFFFF)

    def _record(self, name: str, kind: int, step: int | None, argument: int) -> None:
        number = self.number(name)
        record_span(self.address, number | kind, argument, (self.step if step is None else step) & _LOW)

    def number(self, name: str) -> int:
        """The number that stands for a name in this ring."""
        number = self._numbers.get(name)
        return self._add_name(name) if number is None else number

    def _add_name(self, name: str) -> int:
        number = len(self._numbers)
        if number >= NAMES_MAX - 1:
            if len(self._numbers) > 4096:  # Names that are made up as the script runs.
                return NAMES_MAX - 1
            number, raw = NAMES_MAX - 1, OTHER_NAMES.encode()
        else:
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
    from argosy.observe.ring_reader import RingReader  # Needs numpy.

    reader = RingReader(path)
    columns, names = reader.take() or {}, reader.names()
    spans: list[Span] = []
    running: list[int] = []
    order = ("time", "name", "kind", "step")
    rows: list[tuple[int, int, int, int]] = list(
        zip(*(columns[name].tolist() for name in order if columns), strict=True)
    )
    for at, number, kind, step in rows:
        name = names[number] if number < len(names) else ""
        if kind == _BEGIN:
            running.append(len(spans))
            spans.append(Span(name, at, 0, step))
        elif kind == _END:
            mine = next((place for place in reversed(running) if spans[place].name == name), None)
            if mine is not None:
                running.remove(mine)
                spans[mine] = Span(name, spans[mine].begin, at, spans[mine].step)
    return spans


def has_records(path: str | os.PathLike[str]) -> bool:
    """Whether anything was recorded in a ring."""
    try:
        with open(path, "rb") as file:
            return HEADER.unpack(file.read(HEADER.size))[3] > 0
    except (OSError, struct.error):
        return False


_ring = Ring.void()
on_request: list[Callable[[Ring], None]] = []
"""Called after each step while another process asks for something."""


def record_spans(ring: Ring) -> None:
    """Record the spans of this process in `ring` from now on."""
    global _ring
    _ring = ring


def ring() -> Ring:
    """The ring of this process; without one, a ring that nobody sees."""
    return _ring


def mark_step(step: int) -> None:
    """Record that `step` steps are done; fewer than before if the run went back."""
    global _threads_at
    _ring.step = step & _LOW
    ran, waited = _thread.read()
    _ring.counter(STEP_CPU, ran)
    _ring.counter(STEP_DELAY, waited)
    _ring.point("step", step, step)
    if _ring.requested:
        for answer in on_request:
            answer(_ring)
    now = time.monotonic()
    if now >= _threads_at:
        _threads_at = now + THREADS_S
        _ring.counter(THREADS_CPU, other_threads_cpu_ns())


def count(name: str, value: float) -> None:
    """Record the value of a counter, as an integer."""
    _ring.counter(name, int(value))


class span:  # A function in all but name: `with span("data"):`.
    """Record how long a block takes, in the ring of this rank if it has one; also a decorator, or `begin` and `end`."""

    __slots__ = ("_begin", "_end", "_name", "_ring", "_step")

    def __init__(self, name: str, step: int | None = None) -> None:
        self._name, self._step = name, None if step is None else step & _LOW
        self._ring: Ring | None = None
        self._begin = self._end = 0

    def begin(self) -> "span":
        ring = _ring
        if self._ring is not ring:
            number = ring.number(self._name)
            self._ring, self._begin, self._end = ring, number | _BEGIN << 32, number | _END << 32
        record_span(ring.address, self._begin, 0, ring.step if self._step is None else self._step)
        return self

    def end(self) -> None:
        ring = self._ring  # Where it began.
        if ring is not None:
            record_span(ring.address, self._end, 0, ring.step if self._step is None else self._step)

    __enter__ = begin

    def __exit__(self, *_: object) -> None:
        self.end()

    def __call__(self, function: F) -> F:
        plain, name = cast(Any, function), self._name

        @wraps(plain)
        def timed(*args: Any, **kwargs: Any) -> Any:
            _ring.begin(name)
            try:
                return plain(*args, **kwargs)
            finally:
                _ring.end(name)

        return cast(F, timed)
