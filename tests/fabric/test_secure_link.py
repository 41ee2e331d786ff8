"""Links between hosts: members of the run get through, nobody else has any effect."""

import contextlib
import os
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from argosy.core import ConfigError, DeadlinePassed, PeerLost
from argosy.fabric import (
    HEAD,
    BadFrame,
    Credentials,
    SecureLink,
    SecureListener,
    TlsAddress,
    connect_secure,
    create_authority,
    listen_secure,
    parse_address,
)
from argosy.fabric.run_authority import tls_context
from argosy.fabric.secure_link import UNPROVED_MAX

pytest.importorskip("cryptography")
RUN = "ab12-1"
AUTHORITY = create_authority(RUN)
PATIENCE_S = 60.0


class Word(msgspec.Struct, frozen=True, tag=True):
    text: str


decoder: "msgspec.msgpack.Decoder[Word]" = msgspec.msgpack.Decoder(Word)


class Head:
    """A listener that is served by the test, step by step."""

    def __init__(self, handshake_s: float = PATIENCE_S) -> None:
        self.listener = SecureListener(listen_secure(TlsAddress("127.0.0.1", 0)), AUTHORITY.issue(HEAD), handshake_s)
        self.address = TlsAddress("127.0.0.1", self.listener.port)
        self.links: dict[str, SecureLink[Word]] = {}

    def serve(self, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not until():
            assert time.monotonic() < deadline
            for sock, name in self.listener.accept():
                self.links[name] = SecureLink(sock, decoder, name)
            time.sleep(0.001)

    def join(self, credentials: Credentials) -> SecureLink[Word] | Exception:
        """Connect as a client would, while this head serves; what a refused client meets is returned."""
        met: list[SecureLink[Word] | Exception] = []

        def connect() -> None:
            try:
                link = connect_secure(self.address, credentials, decoder, PATIENCE_S)
            except (PeerLost, OSError) as error:
                met.append(error)
            else:
                met.append(link)

        thread = threading.Thread(target=connect)
        thread.start()
        self.serve(lambda: not thread.is_alive())
        thread.join()
        return met[0]

    def welcome(self, name: str) -> tuple[SecureLink[Word], SecureLink[Word]]:
        """A member joins: its end, and this one."""
        link = self.join(AUTHORITY.issue(name))
        assert isinstance(link, SecureLink), link
        self.serve(lambda: name in self.links)
        return link, self.links[name]

    def close(self) -> None:
        for link in self.links.values():
            link.close()
        self.listener.close()


@pytest.fixture
def head() -> Iterator[Head]:
    opened = Head()
    yield opened
    opened.close()


def raw(head: Head) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", head.address.port))
    sock.settimeout(PATIENCE_S)
    return sock


def read_all(sock: socket.socket, head: Head) -> bytes:
    """What the head says to a connection until it closes it."""
    said, sock_timeout = bytearray(), 0.01
    sock.settimeout(sock_timeout)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        head.serve(lambda: True)
        for sock_name in head.listener.accept():
            raise AssertionError(f"{sock_name[1]} got in")
        try:
            part = sock.recv(65536)
        except TimeoutError:
            continue
        except OSError:
            return bytes(said)
        if not part:
            return bytes(said)
        said += part
    raise AssertionError("the head keeps the connection")


def test_members_talk_both_ways(head: Head):
    ours, theirs = head.welcome("host0")
    text = "x" * 3_000_000
    ours.queue(Word(text))
    theirs.queue(Word("yes"))
    received: list[Word] = []
    while not received:
        ours.flush()
        received += theirs.receive()
    theirs.flush()
    assert received == [Word(text)]
    assert ours.wait(PATIENCE_S) == Word("yes")
    assert theirs.peer == "host0"
    assert ours.own_address == "127.0.0.1"
    ours.close()
    with pytest.raises(PeerLost):
        theirs.wait(PATIENCE_S)


def test_a_member_that_says_nothing_is_waited_for(head: Head):
    ours, _ = head.welcome("host0")
    with pytest.raises(DeadlinePassed):
        ours.wait(0.05)
    ours.close()


@pytest.mark.parametrize(
    "credentials",
    [
        create_authority(RUN).issue("host0"),
        create_authority("other").issue("host0"),
        AUTHORITY.issue("host0", life_days=-0.01),
    ],
    ids=["foreign authority", "another run", "expired"],
)
def test_who_has_no_valid_certificate_stays_out(head: Head, credentials: Credentials):
    mixed = msgspec.structs.replace(credentials, authority=AUTHORITY.certificate, run=RUN)
    met = head.join(mixed)
    if isinstance(met, SecureLink):  # The client's side of a TLS 1.3 handshake ends before the server has looked.
        head.serve(lambda: is_lost(met))
        met.close()
    head.serve(lambda: head.listener.unproved == 0)
    assert not head.links


def test_the_head_has_to_prove_that_it_is_the_head():
    impostor = create_authority(RUN).issue(HEAD)
    listener = SecureListener(listen_secure(TlsAddress("127.0.0.1", 0)), impostor)
    address, met = TlsAddress("127.0.0.1", listener.port), list[Exception]()

    def connect() -> None:
        try:
            connect_secure(address, AUTHORITY.issue("host0"), decoder, PATIENCE_S)
        except PeerLost as error:
            met.append(error)

    thread = threading.Thread(target=connect)
    thread.start()
    while thread.is_alive():
        assert listener.accept() == []
        time.sleep(0.001)
    listener.close()
    assert len(met) == 1


def test_a_host_cannot_pose_as_the_head():
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    host = AUTHORITY.issue("host0")
    fd = os.memfd_create("host")
    os.write(fd, (host.certificate + host.key).encode())
    server.load_cert_chain(f"/proc/self/fd/{fd}")
    os.close(fd)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            sock, _ = listener.accept()
            try:
                server.wrap_socket(sock, server_side=True).close()
            except OSError:
                sock.close()

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(PeerLost):
            connect_secure(TlsAddress("127.0.0.1", listener.getsockname()[1]), AUTHORITY.issue("host1"), decoder)
        thread.join()


def is_lost(link: SecureLink[Word]) -> bool:
    try:
        link.receive()
    except PeerLost:
        return True
    return False


def hello() -> bytes:
    """The first bytes of an honest client."""
    context, incoming, outgoing = tls_context(AUTHORITY.issue("host0")), ssl.MemoryBIO(), ssl.MemoryBIO()
    half = context.wrap_bio(incoming, outgoing)
    with pytest.raises(ssl.SSLWantReadError):
        half.do_handshake()
    return outgoing.read()


def test_garbage_gets_an_alert_at_most_and_hurts_nobody(head: Head):
    first = hello()
    for seed in range(150):
        rng = random.Random(seed)
        kind = seed % 3
        if kind == 0:
            said = rng.randbytes(rng.choice([1, 5, 100, 20_000]))
        elif kind == 1:  # A record header that promises too much, or a hello with bytes turned.
            said = bytes([22, 3, rng.randrange(5)]) + rng.randrange(65536).to_bytes(2, "big") + rng.randbytes(50)
        else:
            broken = bytearray(first)
            for _ in range(rng.choice([1, 3, 30])):
                broken[rng.randrange(5, len(broken))] = rng.randrange(256)
            said = bytes(broken[: rng.choice([len(broken), rng.randrange(1, len(broken))])])
        with raw(head) as sock:
            sock.sendall(said)
            sock.shutdown(socket.SHUT_WR)
            answer = read_all(sock, head)
            # A hello that is still valid is answered as TLS does; all else with an alert.
            assert kind == 2 or answer[:1] in (b"", b"\x15"), f"seed {seed}: {answer[:20]!r}"
            assert len(answer) < 8192
    head.serve(lambda: head.listener.unproved == 0)
    ours, theirs = head.welcome("host0")
    ours.send(Word("still here"))
    assert theirs.wait(PATIENCE_S) == Word("still here")
    ours.close()


def test_a_replayed_handshake_gets_nobody_in(head: Head):
    """Everything that an honest client sends, again."""
    sent, context = bytearray(), tls_context(AUTHORITY.issue("host0"))
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing)
    with raw(head) as sock:
        sock.settimeout(0.01)
        while "host0" not in head.links:
            with contextlib.suppress(ssl.SSLWantReadError):
                client.do_handshake()
            part = outgoing.read()
            sent += part
            sock.sendall(part)
            head.serve(lambda: True)
            for proved, name in head.listener.accept():
                head.links[name] = SecureLink(proved, decoder, name)
            try:
                incoming.write(sock.recv(65536))
            except TimeoutError:
                continue
    with raw(head) as sock:
        sock.sendall(sent)
        sock.shutdown(socket.SHUT_WR)
        read_all(sock, head)
    head.serve(lambda: head.listener.unproved == 0)


def test_who_trickles_bytes_has_a_deadline_in_all():
    head = Head(handshake_s=0.3)
    first = hello()
    with raw(head) as sock:
        deadline = time.monotonic() + PATIENCE_S
        head.serve(lambda: head.listener.unproved == 1)
        for byte in range(len(first) - 1):
            try:
                sock.sendall(first[byte : byte + 1])
            except OSError:
                break
            head.serve(lambda: True)
            assert head.listener.accept() == []
            if head.listener.unproved == 0:
                break
            assert time.monotonic() < deadline
            time.sleep(0.01)
        head.serve(lambda: head.listener.unproved == 0)
    head.close()


def test_those_who_prove_nothing_are_bounded_and_keep_nobody_out(head: Head):
    before = len(os.listdir("/proc/self/fd"))
    crowd = [raw(head) for _ in range(3 * UNPROVED_MAX)]
    head.serve(lambda: head.listener.unproved == UNPROVED_MAX)
    assert len(os.listdir("/proc/self/fd")) - before <= len(crowd) + UNPROVED_MAX
    ours, _ = head.welcome("host0")
    ours.close()
    for sock in crowd:
        sock.close()
    head.serve(lambda: head.listener.unproved == 0)


@pytest.mark.parametrize("frame", [b"\xff\xff\xff\xff", b"\x03\x00\x00\x00\xc1\xc1\xc1", b"\x01\x00\x00\x00\x01"])
def test_a_members_frame_that_is_no_message_ends_its_link(head: Head, frame: bytes):
    ours, theirs = head.welcome("host0")
    ours._unsent += frame  # pyright: ignore[reportPrivateUsage]
    ours.flush()
    with pytest.raises(BadFrame):
        theirs.wait(PATIENCE_S)
    ours.close()


def test_addresses_are_read_as_they_are_written():
    for address in (TlsAddress("10.0.0.1", 4711), TlsAddress("fe80::1", 1), TlsAddress("node-7.cluster", 65535)):
        assert parse_address(str(address)) == address
    for text in ("tls://", "10.0.0.1:1", "tls://a:70000", "unix:/x", "tls://a:b"):
        with pytest.raises(ConfigError):
            parse_address(text)
