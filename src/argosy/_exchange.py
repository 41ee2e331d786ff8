"""Collective operations through a shared segment, in Python: what the Rust engine is compared with.

The layout and the stages are those of native/src/segment.rs and exchange.rs; it waits by polling. Torch is
imported when a reduction is asked for, because numpy has no bfloat16.
"""

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Any

ABORT_AT, BELL_AT, FIRST_AT = 64, 128, 4096
LAST_HEAD_AT, HEADS_AT, HEAD_BYTES, CHECKED_BYTES = 192, 256, 128, 32
ABORTED, MISMATCH, DEADLINE = 1, 2, 3

_ALL_REDUCE, _REDUCE_SCATTER, _, _ALL_GATHER, _BROADCAST = range(5)
_SHARED = (_ALL_GATHER, _BROADCAST)  # what goes to one goes to all
_WIDTHS = (4, 8, 2, 2, 1, 1, 4, 8)
_LINE = 64
_POLL_S = 0.0002

Part = tuple[int, int]


class Broken(Exception):
    """The operation ended without its result; the argument is the code that the caller sees."""


class Segment:
    """One rank's view of a mapped segment."""

    def __init__(self, address: int, rank: int) -> None:
        self.address, self.rank = address, rank
        self.size, self.chunk = self._word(8).value, self._word(12).value
        self._stride = ctypes.c_uint64.from_address(address + 16).value
        self._head_stride = self._word(24).value
        self._stages = [self._word(self._region(index)) for index in range(self.size)]

    def _word(self, offset: int) -> ctypes.c_uint32:
        return ctypes.c_uint32.from_address(self.address + offset)

    def _region(self, rank: int) -> int:
        return FIRST_AT + rank * self._stride

    def stage(self) -> int:
        return self._stages[self.rank].value

    def buffer(self, rank: int, stage: int) -> int:
        heads = -(-(HEADS_AT + 3 * self._head_stride) // 4096) * 4096
        return self.address + self._region(rank) + heads + stage % 3 * self.chunk

    def head(self, rank: int, stage: int) -> int:
        return self.address + self._region(rank) + HEADS_AT + stage % 3 * self._head_stride

    def note_head(self, stage: int) -> None:
        self._word(self._region(self.rank) + LAST_HEAD_AT).value = stage % 3

    def is_aborted(self) -> bool:
        return self._word(ABORT_AT).value != 0

    def _all_arrived(self, stage: int) -> bool:
        return all((word.value - stage) & 0xFFFFFFFF < 0x80000000 for word in self._stages)

    def arrive(self, stage: int, deadline: float) -> None:
        """Arrive at the end of `stage` and wait until all ranks did; an arrival of all beats an abort."""
        after = (stage + 1) & 0xFFFFFFFF
        self._stages[self.rank].value = after
        while not self._all_arrived(after):
            if self.is_aborted():
                if self._all_arrived(after):
                    return
                raise Broken(ABORTED)
            if time.monotonic() > deadline:
                raise Broken(DEADLINE)
            time.sleep(_POLL_S)


class Exchange:
    """One operation of one rank."""

    def __init__(
        self, segment: Segment, head: bytes, sends: Sequence[Part], receives: Sequence[Part], deadline: float
    ) -> None:
        self.segment, self.head, self.deadline = segment, head, deadline
        self.kind, self.element, self.operation = head[:3]
        self.sends, self.receives = sends, receives

    def run(self) -> None:
        if self.segment.is_aborted():
            raise Broken(ABORTED)
        first = self.segment.stage()
        self._describe(first)
        if self.kind == _ALL_REDUCE:
            self._all_reduce(first)
        else:
            self._move_parts(first)

    def _describe(self, stage: int) -> None:
        size, at = self.segment.size, self.segment.head(self.segment.rank, stage)
        spread = [part[1] for parts in (self.sends, self.receives) for part in parts]
        lengths = spread if len(self.sends) == size else spread[:1] * size + spread[1:] * size
        raw = self.head + b"".join(length.to_bytes(8, "little") for length in lengths)
        ctypes.memmove(at, raw, len(raw))
        self.segment.note_head(stage)

    def _agree(self, stage: int) -> int:
        """Return the longest part of any rank, or find, as all ranks do, that they do not want the same."""
        size = self.segment.size
        raw = [ctypes.string_at(self.segment.head(rank, stage), HEAD_BYTES + 16 * size) for rank in range(size)]
        lengths = [memoryview(head)[HEAD_BYTES:].cast("Q") for head in raw]
        if any(head[:CHECKED_BYTES] != raw[0][:CHECKED_BYTES] for head in raw):
            raise Broken(MISMATCH)
        pairs = [(rank, other) for rank in range(size) for other in range(size)]
        if any(lengths[rank][other] != lengths[other][size + rank] for rank, other in pairs):
            raise Broken(MISMATCH)
        return max(lengths[rank][other] for rank, other in pairs)

    def _all_reduce(self, first: int) -> None:
        (data, length), (out, _) = self.sends[0], self.receives[0]
        segment = self.segment
        chunk, ranks = segment.chunk, range(segment.size)
        for step in range(max(1, -(-length // chunk))):
            at = step * chunk
            piece = min(chunk, length - at)
            ctypes.memmove(segment.buffer(segment.rank, first + step), data + at, piece)
            segment.arrive(first + step, self.deadline)
            if step == 0:
                self._agree(first)
            self._reduce([segment.buffer(rank, first + step) for rank in ranks], out + at, piece)

    def _move_parts(self, first: int) -> None:
        segment = self.segment
        shared = self.kind in _SHARED
        room = segment.chunk if shared else segment.chunk // segment.size // _LINE * _LINE
        self._fill(first, 0, room)
        segment.arrive(first, self.deadline)
        count = -(-self._agree(first) // room)
        for step in range(1, count + 1):
            stage = first + step
            if step < count:
                self._fill(stage, step, room)
            if self.kind == _REDUCE_SCATTER:
                self._take_reduced(stage - 1, step - 1, room)
            else:
                self._take(stage - 1, step - 1, room)
            if step < count:
                segment.arrive(stage, self.deadline)

    def _fill(self, stage: int, step: int, room: int) -> None:
        segment = self.segment
        buffer, others = segment.buffer(segment.rank, stage), [r for r in range(segment.size) if r != segment.rank]
        if self.kind in _SHARED:
            if others:
                part = max((self.sends[other] for other in others), key=lambda part: part[1])
                ctypes.memmove(buffer, *_slice(part, step, room))
            return
        for other in others:
            ctypes.memmove(buffer + other * room, *_slice(self.sends[other], step, room))

    def _source(self, other: int, stage: int, step: int, room: int) -> int:
        segment = self.segment
        if other == segment.rank:
            return _slice(self.sends[other], step, room)[0]
        return segment.buffer(other, stage) + (0 if self.kind in _SHARED else segment.rank * room)

    def _take(self, stage: int, step: int, room: int) -> None:
        for other in range(self.segment.size):
            to, length = _slice(self.receives[other], step, room)
            ctypes.memmove(to, self._source(other, stage, step, room), length)

    def _take_reduced(self, stage: int, step: int, room: int) -> None:
        out, length = _slice(self.receives[self.segment.rank], step, room)
        sources = [self._source(other, stage, step, room) for other in range(self.segment.size)]
        self._reduce(sources, out, length)

    def _reduce(self, sources: list[int], out: int, length: int) -> None:
        if length:
            reduce(self.element, self.operation, sources, out, length)


def _slice(part: Part, step: int, room: int) -> Part:
    start = min(step * room, part[1])
    return part[0] + start, min(room, part[1] - start)


def reduce(element: int, operation: int, sources: list[int], out: int, length: int) -> None:
    """Reduce `length` bytes of each source into `out`, in the tree of native/src/reduce.rs."""
    import torch

    narrow: Any = (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
    )[element]
    wide: Any = torch.float32 if element in (2, 3) else narrow
    combine: Callable[[Any, Any], Any] = (
        torch.add,
        torch.add,
        torch.mul,
        torch.minimum,
        torch.maximum,
        torch.bitwise_and,
        torch.bitwise_or,
        torch.bitwise_xor,
    )[operation]

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
    view = Segment(segment, rank)
    count = 1 if head[0] == _ALL_REDUCE else view.size
    reduces = head[0] in (_ALL_REDUCE, _REDUCE_SCATTER)
    known = head[0] <= _BROADCAST and head[2] < 8 and (not reduces or head[1] < len(_WIDTHS))
    if not known or len(head) != HEAD_BYTES or len(sends) != count or len(receives) != count:
        raise ValueError("no such collective operation")
    try:
        Exchange(view, head, sends, receives, time.monotonic() + timeout_s).run()
    except Broken as broken:
        return int(broken.args[0])
    return 0
