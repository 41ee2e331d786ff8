"""Collective operations through a shared segment, in Python: the reference of the Rust engine.

It has the layout and the counters of native/src/segment.rs and exchange.rs, but waits by polling, and moves one piece
after another. It reduces with torch, which is imported on first use, because numpy has no bfloat16.
"""

import ctypes
import errno
import socket
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

STATE_AT, FIRST_AT = 64, 4096
COUNTERS_AT, LAST_HEAD_AT, HEADS_AT, HEAD_BYTES, CHECKED_BYTES = 128, 192, 256, 128, 32
ABORTED, MISMATCH, DEADLINE = 1, 2, 3
ABORT_DEADLINE = 0xFFFFFFFE

_ALL_REDUCE, _REDUCE_SCATTER, _, _ALL_GATHER, _BROADCAST = range(5)
_SHARED = (_ALL_GATHER, _BROADCAST)  # All ranks get the same bytes.
_FILLED, _MADE, _TAKEN = range(3)
ELEMENTS = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64")
"""The element types that can be reduced, in the order of native/src/reduce.rs."""
_COMBINE = ("add", "add", "mul", "minimum", "maximum", "bitwise_and", "bitwise_or", "bitwise_xor")
_LINE = 64
_POLL_S = 0.0002

Part = tuple[int, int]
"""Address and length of a piece of memory."""


class CollectiveFailed(Exception):
    """The operation failed; the argument is the code that `run_collective` returns."""


class SegmentView:
    """One rank's view of a mapped segment."""

    def __init__(self, address: int, rank: int) -> None:
        self.address, self.rank = address, rank
        self.size, self.slot, self.window = self._word(8).value, self._word(12).value, self._word(32).value
        self._stride = ctypes.c_uint64.from_address(address + 16).value
        self._head_stride = self._word(24).value
        self._state = ctypes.c_uint64.from_address(address + STATE_AT)

    def _word(self, offset: int) -> ctypes.c_uint32:
        return ctypes.c_uint32.from_address(self.address + offset)

    def _region(self, rank: int) -> int:
        return FIRST_AT + rank * self._stride

    def stage(self) -> int:
        return self._word(self._region(self.rank)).value

    def slot_of(self, rank: int, stage: int, index: int) -> int:
        heads = -(-(HEADS_AT + 2 * self._head_stride) // 4096) * 4096
        place = stage % 2 * self.window + index % self.window
        return self.address + self._region(rank) + heads + place * self.slot

    def head(self, rank: int, stage: int) -> int:
        return self.address + self._region(rank) + HEADS_AT + stage % 2 * self._head_stride

    def note_head(self, stage: int) -> None:
        self._word(self._region(self.rank) + LAST_HEAD_AT).value = stage % 2

    def counter(self, rank: int, which: int) -> ctypes.c_uint32:
        return self._word(self._region(rank) + COUNTERS_AT + 4 * which)

    @contextmanager
    def _alone(self) -> Generator[None]:
        """Hold a lock that a dying process loses: the socket address named after the segment."""
        name = b"\0argosy-segment-" + ctypes.string_at(self.address + 40, 16)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as lock:
            while True:
                try:
                    lock.bind(name)
                    break
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:
                        raise
                    time.sleep(_POLL_S)
            yield

    def is_aborted(self) -> bool:
        return self._state.value >> 32 != 0

    def abort(self, code: int) -> bool:
        with self._alone():
            if self.is_aborted():
                return False
            self._state.value |= code << 32
            return True

    def arrive(self, stage: int, deadline: float) -> None:
        """Arrive at the end of `stage` and wait until all ranks have; no rank arrives after an abort."""
        after = (stage + 1) & 0xFFFFFFFF
        with self._alone():
            if self.is_aborted():
                raise CollectiveFailed(ABORTED)
            self._state.value = (self._state.value + 1) & 0xFFFFFFFF
        self._word(self._region(self.rank)).value = after
        self.wait(lambda: _reached(self._state.value, after * self.size), deadline)

    def wait(self, done: Callable[[], bool], deadline: float) -> None:
        """Wait until `done`, even if the segment is aborted meanwhile."""
        while not done():
            if self.is_aborted():
                if done():
                    return
                raise CollectiveFailed(ABORTED)
            if time.monotonic() > deadline:
                won = self.abort(ABORT_DEADLINE)
                if done():
                    return
                raise CollectiveFailed(DEADLINE if won else ABORTED)
            time.sleep(_POLL_S)


class Exchange:
    """One operation of one rank."""

    def __init__(
        self, segment: SegmentView, head: bytes, sends: Sequence[Part], receives: Sequence[Part], deadline: float
    ) -> None:
        self.segment, self.head, self.deadline = segment, head, deadline
        self.kind, self.element, self.operation = head[:3]
        self.sends, self.receives = sends, receives
        self.stage = segment.stage()
        apart = self.kind not in (_ALL_REDUCE, *_SHARED)
        self.room = segment.slot // segment.size // _LINE * _LINE if apart else segment.slot

    def run(self) -> None:
        segment = self.segment
        if segment.is_aborted():
            raise CollectiveFailed(ABORTED)
        self._describe()
        given = max(part[1] for part in self.sends)
        for index in range(min(segment.window, -(-given // self.room))):
            self._fill(index)
        segment.arrive(self.stage, self.deadline)
        self._flow(-(-self._agree() // self.room))

    def _flow(self, count: int) -> None:
        """Take one piece after another, and fill its slot again when all ranks have taken it."""
        segment = self.segment
        base = segment.counter(segment.rank, _TAKEN).value
        for index in range(count):
            if index >= segment.window:
                self._await(_TAKEN, base + index - segment.window + 1)
                self._fill(index)
            segment.counter(segment.rank, _FILLED).value = base + index + 1
            if index >= segment.window:
                self._await(_FILLED, base + index + 1)
            self._take(index)
            for counter in (_MADE, _TAKEN):
                segment.counter(segment.rank, counter).value = base + index + 1

    def _await(self, which: int, target: int) -> None:
        words = [self.segment.counter(rank, which) for rank in range(self.segment.size)]
        self.segment.wait(lambda: all(_reached(word.value, target) for word in words), self.deadline)

    def _describe(self) -> None:
        size, at = self.segment.size, self.segment.head(self.segment.rank, self.stage)
        spread = [part[1] for parts in (self.sends, self.receives) for part in parts]
        lengths = spread if len(self.sends) == size else spread[:1] * size + spread[1:] * size
        raw = self.head + b"".join(length.to_bytes(8, "little") for length in lengths)
        ctypes.memmove(at, raw, len(raw))
        self.segment.note_head(self.stage)

    def _agree(self) -> int:
        """Return the longest part of any rank, or raise a mismatch, which all ranks find alike."""
        size = self.segment.size
        raw = [ctypes.string_at(self.segment.head(rank, self.stage), HEAD_BYTES + 16 * size) for rank in range(size)]
        lengths = [memoryview(head)[HEAD_BYTES:].cast("Q") for head in raw]
        if any(head[:CHECKED_BYTES] != raw[0][:CHECKED_BYTES] for head in raw):
            raise CollectiveFailed(MISMATCH)
        pairs = [(rank, other) for rank in range(size) for other in range(size)]
        if any(lengths[rank][other] != lengths[other][size + rank] for rank, other in pairs):
            raise CollectiveFailed(MISMATCH)
        return max(lengths[rank][other] for rank, other in pairs)

    def _fill(self, index: int) -> None:
        segment = self.segment
        slot = segment.slot_of(segment.rank, self.stage, index)
        if self.kind == _ALL_REDUCE:
            ctypes.memmove(slot, *_slice(self.sends[0], index, self.room))
            return
        others = [r for r in range(segment.size) if r != segment.rank]
        if self.kind in _SHARED:
            if others:
                part = max((self.sends[other] for other in others), key=lambda part: part[1])
                ctypes.memmove(slot, *_slice(part, index, self.room))
            return
        for other in others:
            ctypes.memmove(slot + other * self.room, *_slice(self.sends[other], index, self.room))

    def _take(self, index: int) -> None:
        segment = self.segment
        slots = [segment.slot_of(other, self.stage, index) for other in range(segment.size)]
        if self.kind == _ALL_REDUCE:
            self._reduce(slots, *_slice(self.receives[0], index, self.room))
            return
        place = 0 if self.kind in _SHARED else segment.rank * self.room
        sources = [slot + place for slot in slots]
        sources[segment.rank] = _slice(self.sends[segment.rank], index, self.room)[0]
        if self.kind == _REDUCE_SCATTER:
            self._reduce(sources, *_slice(self.receives[segment.rank], index, self.room))
            return
        for other, source in enumerate(sources):
            to, length = _slice(self.receives[other], index, self.room)
            ctypes.memmove(to, source, length)

    def _reduce(self, sources: list[int], out: int, length: int) -> None:
        if length:
            reduce(self.element, self.operation, sources, out, length)


def _reached(value: int, target: int) -> bool:
    return (value - target) & 0xFFFFFFFF < 0x80000000


def _slice(part: Part, index: int, room: int) -> Part:
    start = min(index * room, part[1])
    return part[0] + start, min(room, part[1] - start)


def reduce(element: int, operation: int, sources: list[int], out: int, length: int) -> None:
    """Reduce `length` bytes of each source into `out`, in the tree of native/src/reduce.rs."""
    import torch

    narrow: Any = getattr(torch, ELEMENTS[element])
    wide: Any = torch.float32 if element in (2, 3) else narrow
    combine: Callable[[Any, Any], Any] = getattr(torch, _COMBINE[operation])

    def tree(some: list[int]) -> Any:
        if len(some) == 1:
            memory = bytearray(ctypes.string_at(some[0], length))
            return torch.frombuffer(memory, dtype=narrow).to(wide)
        half = 1 << (len(some) - 1).bit_length() - 1
        return combine(tree(some[:half]), tree(some[half:]))

    total = tree(sources)
    if operation == 1:
        total /= len(sources)
    result = total.to(narrow).contiguous()
    ctypes.memmove(out, result.data_ptr(), length)


def run_collective(
    segment: int, rank: int, head: bytes, sends: Sequence[Part], receives: Sequence[Part], timeout_s: float
) -> int:
    view = SegmentView(segment, rank)
    count = 1 if head[0] == _ALL_REDUCE else view.size
    reduces = head[0] in (_ALL_REDUCE, _REDUCE_SCATTER)
    known = head[0] <= _BROADCAST and head[2] < len(_COMBINE) and (not reduces or head[1] < len(ELEMENTS))
    if not known or len(head) != HEAD_BYTES or len(sends) != count or len(receives) != count:
        raise ValueError("no such collective operation")
    try:
        Exchange(view, head, sends, receives, time.monotonic() + timeout_s).run()
    except CollectiveFailed as broken:
        return int(broken.args[0])
    return 0
