"""Frames in pieces and in disorder, and values that come out as they went in."""

import array
import os
import random
import socket

import msgspec
import numpy as np
import pytest
from seeds import each

from argosy.fabric import BadFrame, Call, Link, PackedValue
from argosy.fabric.frames import Body, FrameReader, ReplyFrame, pack, send_some
from argosy.fabric.payload import dump, load
from argosy.fabric.segments import SEGMENT_MIN, SegmentPool, layout_buffers, map_received

VALUES = [
    None,
    (1, 2.5, "text", b"bytes", True),
    {"list": [1, [2, [3, [4, [5]]]]]},
    b"x" * 100_000,
    np.arange(10_000),
    [np.ones(3), np.zeros((300, 300)), np.arange(SEGMENT_MIN), np.arange(5)],
]


def same(a: object, b: object) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b  # type: ignore[arg-type]


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_values_arrive_as_they_were_sent(value: object):
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with left, right:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            left.setsockopt(socket.SOL_SOCKET, option, 1 << 20)
            right.setsockopt(socket.SOL_SOCKET, option, 1 << 20)
        reader, got = FrameReader("peer"), []
        for number in range(3):
            packed = PackedValue(value)
            parts, fds = pack(Call(number, -1, "a", "m", packed.body), packed)
            while not send_some(left, parts, fds):
                fds = []
                got += reader.read(right) or []
        while len(got) < 3:
            got += reader.read(right) or []
        assert [frame.message.id for frame in got] == [0, 1, 2]
        assert all(same(frame.take(), value) for frame in got)


@each("seed", range(20))
def test_frames_come_in_any_pieces(seed: int):
    chance = random.Random(seed)
    values = [chance.choice([7, "word", np.arange(2000), b"z" * 50_000]) for _ in range(20)]
    stream = b""
    for number, value in enumerate(values):
        packed = PackedValue(value)
        stream += b"".join(bytes(part) for part in pack(ReplyFrame(number, 0, 0, packed.body), packed)[0])
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    reader, got = FrameReader("peer"), []
    with left, right:
        while stream:
            piece, stream = stream[: (size := chance.choice([1, 3, 17, 1000, 60_000]))], stream[size:]
            left.sendall(piece)
            while True:
                try:
                    got += reader.read(right) or []
                except BlockingIOError:
                    break
        left.close()
        assert reader.read(right) is None
    assert [same(frame.take(), value) for frame, value in zip(got, values, strict=True)] == [True] * 20


@each("seed", range(50))
def test_garbage_is_a_bad_frame_and_nothing_else(seed: int):
    chance = random.Random(seed)
    packed = PackedValue(np.arange(2000))
    good = b"".join(bytes(part) for part in pack(Call(1, -1, "a", "m", packed.body), packed)[0])
    bad = bytearray(good)
    for _ in range(chance.randrange(1, 30)):
        bad[chance.randrange(40)] = chance.randrange(256)
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with left, right:
        left.sendall(chance.choice([bytes(bad), chance.randbytes(400)]))
        left.close()
        reader = FrameReader("peer")
        try:
            while reader.read(right) is not None:
                pass
        except BadFrame:
            pass


def test_text_that_is_no_text_ends_a_link_and_nothing_else():
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    link = Link(right, msgspec.msgpack.Decoder(str), "peer")
    with left:
        left.sendall(b"\x02\0\0\0\0\0\0\0\xa1\xec")
        with pytest.raises(BadFrame):
            link.receive()
    link.close()


def test_sizes_that_do_not_add_up_are_refused():
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with left, right:
        left.sendall(pack(Call(1, -1, "a", "m", Body(b"", [1 << 60])))[0][0])
        with pytest.raises(BadFrame, match="do not add up"):
            FrameReader("peer").read(right)


def test_descriptors_that_nobody_wanted_are_closed():
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with left, right:
        before = len(os.listdir("/proc/self/fd"))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1]))]
        left.sendmsg([b"garbage of some length, at least a header"], rights)
        reader = FrameReader("peer")
        with pytest.raises(BadFrame):
            reader.read(right)
        reader.close()
        assert len(os.listdir("/proc/self/fd")) == before


def test_s1_a_segment_is_used_again_only_when_all_let_go():
    segments = SegmentPool()
    data = memoryview(bytearray(b"a" * SEGMENT_MIN))
    first = segments.fill([data], receivers=2)
    segments.returned(first.number)
    assert segments.fill([data], 1).number != first.number
    segments.returned(first.number)
    assert segments.fill([data], 1).number == first.number


def test_a_borrowed_segment_is_private_and_says_when_it_is_free():
    freed: list[int] = []
    segment = SegmentPool().fill([memoryview(b"a" * SEGMENT_MIN)], 2)
    mine, theirs = (map_received(os.dup(segment.fd), [SEGMENT_MIN], lambda: freed.append(1)) for _ in range(2))
    mine[0][0] = ord("b")
    assert bytes(theirs[0][:2]) == b"aa"
    held = np.frombuffer(mine.pop(), dtype=np.uint8)[5:]
    assert freed == []
    del held
    assert freed == [1]
    del theirs
    assert freed == [1, 1]


def test_buffers_lie_apart():
    offsets, size = layout_buffers([1, 64, 65])
    assert (offsets, size) == ([0, 64, 128], 256)


def test_functions_and_classes_of_a_script_travel_by_value():
    secret = 5

    def add(x: int) -> int:
        return x + secret

    pickled, buffers = dump(add)
    assert load(pickled, buffers)(2) == 7
