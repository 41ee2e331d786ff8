"""The frames of calls: an envelope, then raw buffers; descriptors of shared segments travel with the first byte.

Reading is incremental and never blocks. Values are unpickled only by `CallFrame.take`.

F1  Invalid bytes raise `BadFrame`, before any of them is unpickled.
F2  The sizes of the envelope and of the buffers are bounded.
"""

import array
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from argosy.fabric.link import BadFrame, keep_descriptors
from argosy.fabric.payload import dump, load
from argosy.fabric.segments import SEGMENT_MIN, MemorySegment, map_received, own_segments

_HEADER = struct.Struct("<HHIQ")
_MAGIC = 0xA5C1
ENVELOPE_MAX = 16 << 20
TAIL_MAX = 4 << 30
_ENVELOPE_INLINE_MAX = 32 << 10
_READ_BYTES = 64 << 10
_FDS_MAX = 4
_ANCILLARY = socket.CMSG_SPACE(4 * _FDS_MAX)
# Plain integers: an operation on the enum costs more than the system call.
_SEND = int(socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
_buffers: list[memoryview] = []
_RECEIVE, _TRUNCATED = int(socket.MSG_DONTWAIT), int(socket.MSG_CTRUNC)


class Body(msgspec.Struct, array_like=True, frozen=True):
    """A pickled value."""

    pickled: bytes = b""
    """Empty if the pickle travels as the first buffer."""
    sizes: tuple[int, ...] = ()
    """Sizes of the buffers; the size of a pickle that travels as a buffer is negative."""
    segment: int = 0
    """The segment that holds the large buffers, 0 for none."""


class Greeting(msgspec.Struct, array_like=True, frozen=True, tag=0):
    """The first message of the callee: its generation, and its number for this link."""

    generation: int
    link: int


class Call(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """Run an endpoint. `deadline` is on the host's monotonic clock, 0 for none."""

    id: int
    generation: int
    """The generation that the caller expects, -1 for any."""
    actor: str
    method: str
    body: Body
    deadline: float = 0.0
    chain: int = 0
    """The same for a call and all calls made by its endpoint: a rank that waits in a chain serves that chain."""
    wanted: bool = True
    """Whether the caller wants a reply."""
    freed: tuple[int, ...] = ()
    """Segments of the receiver that the sender of this frame has released."""


class ReplyFrame(msgspec.Struct, array_like=True, frozen=True, tag=2):
    """The outcome of a call; `kind` is one of the constants below."""

    id: int
    generation: int
    kind: int
    body: Body
    freed: tuple[int, ...] = ()


RESULT, RAISED, CANCELLED, LATE, STALE = range(5)

Envelope = Greeting | Call | ReplyFrame
WithBody = Call | ReplyFrame
_decoder: msgspec.msgpack.Decoder[Envelope] = msgspec.msgpack.Decoder(Envelope)
_encoder = msgspec.msgpack.Encoder()


class PackedValue:
    """A value pickled for sending, to one receiver or to several."""

    __slots__ = ("body", "segment", "tail")

    def __init__(self, value: object, receivers: int = 1) -> None:
        pickled, buffers = dump(value)
        self.segment: MemorySegment | None = None
        if not buffers and len(pickled) <= _ENVELOPE_INLINE_MAX:
            self.body = Body(pickled)
            return
        self.tail: list[bytes | memoryview] = []
        sizes = [buffer.nbytes for buffer in buffers]
        large = [buffer for buffer in buffers if buffer.nbytes >= SEGMENT_MIN]
        if large:
            try:
                self.segment = own_segments.fill(large, receivers)
            except OSError:
                large = []  # Send them through the socket instead.
        self.tail += [b for b in buffers if not large or b.nbytes < SEGMENT_MIN]
        if len(pickled) > _ENVELOPE_INLINE_MAX:
            self.tail.insert(0, pickled)
            sizes.insert(0, -len(pickled))
            pickled = b""
        self.body = Body(pickled, tuple(sizes), self.segment.number if self.segment is not None else 0)


class CallFrame(msgspec.Struct, eq=False):
    """A received message with its buffers."""

    message: Envelope
    pickled: bytes | memoryview = b""
    buffers: Sequence[memoryview] = ()
    taken: bool = False

    def take(self) -> Any:
        """Unpickle the value, once: the buffers belong to it from then on."""
        pickled, buffers = self.pickled, self.buffers
        self.pickled, self.buffers, self.taken = b"", (), True
        return load(pickled, buffers)


def pack(message: Envelope, packed: PackedValue | None = None) -> tuple[list[bytes | memoryview], list[int]]:
    """Return the parts to send, and the descriptors that go with the first of them."""
    envelope = _encoder.encode(message)
    if packed is None or not packed.body.sizes:
        return [_HEADER.pack(_MAGIC, 0, len(envelope), 0) + envelope], []
    fds = [] if packed.segment is None else [packed.segment.fd]
    tail = sum(len(part) if isinstance(part, bytes) else part.nbytes for part in packed.tail)
    return [_HEADER.pack(_MAGIC, len(fds), len(envelope), tail) + envelope, *packed.tail], fds


def send_some(sock: socket.socket, parts: list[bytes | memoryview], fds: Sequence[int]) -> bool:
    """Send what the socket accepts and remove it from `parts`; False if something is left.

    Raises:
        OSError: the connection is gone.
    """
    while parts:
        try:
            if not fds and len(parts) == 1:
                sent = sock.send(part := parts[0], _SEND)
                if type(part) is bytes and sent == len(part):
                    parts.clear()
                    return True
            elif fds:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
                sent = sock.sendmsg(parts[:512], rights, _SEND)
            else:
                sent = sock.sendmsg(parts[:512], [], _SEND)
        except BlockingIOError:
            return False
        fds = ()
        while parts and sent >= (size := len(parts[0]) if isinstance(parts[0], bytes) else parts[0].nbytes):
            sent -= size
            parts.pop(0)
        if sent:
            parts[0] = memoryview(parts[0]).cast("B")[sent:]
    return True


class FrameReader:
    """Assembles the frames of one socket. `freed` collects the peer's segments that this process has released."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.freed: deque[int] = deque()
        self._rest = b""
        """Bytes of an incomplete envelope."""
        self._fds: deque[int] = deque()
        self._filling: tuple[WithBody, bytearray, int] | None = None
        """A message whose buffers are incomplete, the memory for them, and the bytes read so far."""

    def read(self, sock: socket.socket) -> list[CallFrame] | None:
        """Read once without blocking, and return the complete frames; None if the peer closed the connection.

        Raises:
            BlockingIOError: there is nothing to read.
            OSError: the connection is gone.
            BadFrame: the bytes are not frames (F1).
        """
        if self._filling is not None:
            return self._fill(sock, *self._filling)
        # Readers share buffers: one each would be too much for a thousand ranks, a new one per message is slow.
        view = _buffers.pop() if _buffers else memoryview(bytearray(_READ_BYTES))
        try:
            count, ancillary, flags, _ = sock.recvmsg_into((view,), _ANCILLARY, _RECEIVE)
            data = view[:count].tobytes()
        finally:
            _buffers.append(view)
        if ancillary or flags & _TRUNCATED:
            keep_descriptors(ancillary, flags, self._fds, self.peer)
        if not data:
            return None
        if self._rest:
            data, self._rest = self._rest + data, b""
        frames: list[CallFrame] = []
        at, size = 0, len(data)
        while size - at >= _HEADER.size:
            magic, fds, length, tail = _HEADER.unpack_from(data, at)
            if magic != _MAGIC or fds > _FDS_MAX or length > ENVELOPE_MAX or tail > TAIL_MAX:
                raise BadFrame(f"{self.peer} sent bytes that are not a frame")
            end = at + _HEADER.size + length
            if end > size:
                break
            try:
                message = _decoder.decode(data[at + _HEADER.size : end])
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise BadFrame(f"{self.peer} sent an unexpected message: {error}") from None
            at = end
            if isinstance(message, Greeting):
                frames.append(CallFrame(message))
            elif not (body := message.body).sizes:
                frames.append(CallFrame(message, body.pickled))
            else:
                at += self._begin_tail(message, fds, tail, data[at : at + tail], frames)
        if at < size:
            self._rest = data[at:]
        return frames

    def take_freed(self) -> tuple[int, ...]:
        """Return the segments that were released since the last call."""
        return tuple(self.freed.popleft() for _ in range(len(self.freed)))

    def close(self) -> None:
        """Close descriptors that belong to no complete frame."""
        while self._fds:
            os.close(self._fds.popleft())

    def _fill(self, sock: socket.socket, message: WithBody, tail: bytearray, filled: int) -> list[CallFrame] | None:
        """Read buffers straight into their memory."""
        with memoryview(tail)[filled:] as target:
            count, ancillary, flags, _ = sock.recvmsg_into([target], _ANCILLARY, _RECEIVE)
        keep_descriptors(ancillary, flags, self._fds, self.peer)
        if count == 0:
            return None
        if filled + count == len(tail):
            return [self._finish(message, tail)]
        self._filling = (message, tail, filled + count)
        return []

    def _begin_tail(self, message: WithBody, fds: int, size: int, here: bytes, frames: list[CallFrame]) -> int:
        """Begin to collect the buffers of a message, of which `here` has arrived; returns how many bytes that is."""
        body = message.body
        expected = sum(abs(each) for each in body.sizes if not (body.segment and each >= SEGMENT_MIN))
        if expected != size or fds != bool(body.segment) or len(self._fds) < fds:
            raise BadFrame(f"{self.peer} sent a frame whose sizes do not add up")
        tail = bytearray(size)
        tail[: len(here)] = here
        if len(here) == size:
            frames.append(self._finish(message, tail))
        else:
            self._filling = (message, tail, len(here))
        return len(here)

    def _finish(self, message: WithBody, tail: bytearray) -> CallFrame:
        self._filling = None
        body, at, view = message.body, 0, memoryview(tail)
        pickled: bytes | memoryview = body.pickled
        buffers: list[memoryview] = []
        mapped: list[memoryview] = []
        if body.segment:
            freed, number = self.freed, body.segment
            mapped = map_received(
                self._fds.popleft(), [s for s in body.sizes if s >= SEGMENT_MIN], lambda: freed.append(number)
            )
        for size in body.sizes:
            if body.segment and size >= SEGMENT_MIN:
                buffers.append(mapped.pop(0))
                continue
            part, at = view[at : at + abs(size)], at + abs(size)
            if size < 0:
                pickled = part
            else:
                buffers.append(part)
        return CallFrame(message, pickled, buffers)
