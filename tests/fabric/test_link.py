"""Links: messages and descriptors arrive whole and in order, and a bad peer hurts nobody else."""

import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from argosy.core import DeadlinePassed, PeerLost
from argosy.fabric import BadFrame, Link, accept, connect, listen
from argosy.fabric.link import FDS_MAX, FRAME_BYTES_MAX, UNSENT_BYTES_MAX


class Note(msgspec.Struct, frozen=True, tag=True):
    text: str


class Blob(msgspec.Struct, frozen=True, tag=True):
    data: bytes


decoder: "msgspec.msgpack.Decoder[Note | Blob]" = msgspec.msgpack.Decoder(Note | Blob)
Ends = tuple[Link[Note | Blob], Link[Note | Blob]]


@pytest.fixture
def ends() -> Iterator[Ends]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    links = Link(left, decoder, "left"), Link(right, decoder, "right")
    yield links
    for link in links:
        link.close()


@pytest.fixture
def raw() -> Iterator[tuple[socket.socket, Link[Note | Blob]]]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    link = Link(right, decoder, "somebody")
    yield left, link
    left.close()
    link.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def frame(payload: bytes, fds: int = 0) -> bytes:
    return struct.pack("<II", len(payload), fds) + payload


def test_messages_arrive_in_order(ends: Ends):
    for number in range(1000):
        ends[0].send(Note(str(number)))
    received: list[str] = []
    while len(received) < 1000:
        ends[0].flush()
        message, _ = ends[1].wait(300.0)
        assert isinstance(message, Note)
        received.append(message.text)
    assert received == [str(number) for number in range(1000)]


def test_descriptors_arrive_with_their_message_and_are_not_inherited(ends: Ends):
    inside, outside = os.pipe()
    ends[0].send(Note("none"))
    ends[0].send(Note("one"), [outside])
    ends[0].send(Note("none again"))
    os.close(outside)
    assert ends[1].wait(300.0) == (Note("none"), [])
    message, fds = ends[1].wait(300.0)
    assert message == Note("one")
    assert not os.get_inheritable(fds[0])
    os.write(fds[0], b"through")
    os.close(fds[0])
    assert os.read(inside, 16) == b"through"
    os.close(inside)
    assert ends[1].wait(300.0) == (Note("none again"), [])


def test_as_many_descriptors_as_are_allowed_arrive(ends: Ends):
    with open(os.devnull) as null:
        ends[0].send(Note("many"), [null.fileno()] * FDS_MAX)
    _, fds = ends[1].wait(300.0)
    assert len(fds) == FDS_MAX
    for fd in fds:
        os.close(fd)


def test_a_message_larger_than_the_socket_is_sent_in_pieces(ends: Ends):
    blob = Blob(os.urandom(8 << 20))
    sender = threading.Thread(target=lambda: ends[0].send(blob) or drain(ends[0]))
    sender.start()
    message, _ = ends[1].wait(300.0)
    sender.join(30.0)
    assert message == blob


def drain(link: Link[Note | Blob]) -> None:
    import select

    while link.wants_write:
        select.select([], [link], [], 10.0)
        link.flush()


def test_a_half_frame_waits_for_its_other_half(raw: "tuple[socket.socket, Link[Note | Blob]]"):
    sock, link = raw
    whole = frame(msgspec.msgpack.encode(Note("halved")))
    for byte in whole[:-1]:
        sock.send(bytes([byte]))
        assert link.receive() == []
    sock.send(whole[-1:])
    assert link.receive() == [(Note("halved"), [])]


def test_a_half_frame_of_a_peer_that_is_gone_is_no_message(raw: "tuple[socket.socket, Link[Note | Blob]]"):
    sock, link = raw
    sock.send(frame(msgspec.msgpack.encode(Note("halved")))[:-3])
    sock.close()
    with pytest.raises(PeerLost):
        link.receive()


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\xff" * 64,
        frame(b"\xc1\xc1\xc1"),
        frame(msgspec.msgpack.encode({"type": "Unknown"})),
        frame(msgspec.msgpack.encode([1, 2, 3])),
        frame(msgspec.msgpack.encode({"type": "Note", "text": 7})),
        frame(b""),
        struct.pack("<II", FRAME_BYTES_MAX + 1, 0),
        struct.pack("<II", 4, FDS_MAX + 1),
    ],
)
def test_l2_what_is_no_message_ends_the_link(raw: "tuple[socket.socket, Link[Note | Blob]]", garbage: bytes):
    sock, link = raw
    sock.send(garbage)
    with pytest.raises(BadFrame):
        link.receive()


def test_l2_messages_before_the_garbage_were_whole(raw: "tuple[socket.socket, Link[Note | Blob]]"):
    sock, link = raw
    sock.send(frame(msgspec.msgpack.encode(Note("good"))))
    assert link.receive() == [(Note("good"), [])]
    sock.send(b"\xff" * 8)
    with pytest.raises(BadFrame):
        link.receive()


def test_descriptors_of_a_refused_message_are_closed(raw: "tuple[socket.socket, Link[Note | Blob]]"):
    sock, link = raw
    before = descriptors()
    with open(os.devnull) as null:
        socket.send_fds(sock, [frame(b"\xc1", 1)], [null.fileno()])
    with pytest.raises(BadFrame):
        link.receive()
    assert descriptors() == before


def test_descriptors_that_no_frame_asks_for_are_closed_with_the_link():
    before = descriptors()
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    link = Link(right, decoder, "somebody")
    with open(os.devnull) as null:
        socket.send_fds(left, [b"\x01"], [null.fileno()] * 3)
    assert link.receive() == []
    left.close()
    link.close()
    assert descriptors() == before


def test_unsent_descriptors_are_closed_with_the_link():
    before = descriptors()
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    link = Link(left, decoder, "a slow peer")
    with open(os.devnull) as null:
        for _ in range(100):
            link.send(Blob(bytes(1 << 16)), [null.fileno()])
    assert link.wants_write
    link.close()
    right.close()
    assert descriptors() == before


def test_l3_a_peer_that_does_not_read_is_given_up(ends: Ends):
    blob = Blob(bytes(4 << 20))

    def send_all() -> None:
        for _ in range(2 * UNSENT_BYTES_MAX // len(blob.data)):
            ends[0].send(blob)

    with pytest.raises(PeerLost, match="too slowly"):
        send_all()


def test_l3_a_frame_has_a_bound(ends: Ends):
    with pytest.raises(ValueError, match="at most"):
        ends[0].send(Blob(bytes(FRAME_BYTES_MAX)))


def test_a_wait_ends_at_its_deadline(ends: Ends):
    with pytest.raises(DeadlinePassed):
        ends[0].wait(0.01)


def test_what_was_sent_before_the_end_is_received(ends: Ends):
    ends[0].send(Note("last words"))
    ends[0].close()
    assert ends[1].wait(300.0) == (Note("last words"), [])
    with pytest.raises(PeerLost, match="closed the connection"):
        ends[1].wait(300.0)


def test_a_dead_socket_is_replaced_by_the_next_listener(tmp_path: Path):
    path = tmp_path / "s.sock"
    listen(path).close()
    with pytest.raises(PeerLost, match="cannot connect"):
        connect(path, decoder, "nobody")
    with listen(path) as listener:
        link = connect(path, decoder, "somebody")
        sock = accept(listener)
        assert sock is not None
        sock.close()
        link.close()
        assert accept(listener) is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_l1_a_peer_of_another_user_is_refused(tmp_path: Path):
    path = tmp_path / "s.sock"
    program = (
        "import os, socket, sys\n"
        "sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)\n"
        "os.setuid(65534)\n"
        "sock.connect(sys.argv[1])\n"
        "print('connected', flush=True)\n"
        "print(sock.recv(16), flush=True)\n"
    )
    with listen(path) as listener:
        for directory in (tmp_path, *tmp_path.parents):
            if directory != Path("/") and directory.stat().st_uid == os.getuid() and directory != Path("/tmp"):
                directory.chmod(directory.stat().st_mode | 0o011)
        path.chmod(0o666)  # As if the permissions had failed: the credentials still hold.
        stranger = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True)
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "connected\n"
        assert accept(listener) is None
        assert stranger.stdout.readline() == "b''\n"
        stranger.stdout.close()
        assert stranger.wait(300.0) == 0
