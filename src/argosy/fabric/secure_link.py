"""Framed messages between agents on different hosts, over TLS 1.3 with certificates on both sides.

The interface is that of `link.py`, without descriptors. A frame is four bytes (payload length) and a msgpack payload.

S1  Nothing is decoded before both sides have proved which member of the run they are.
S2  A peer that has not proved it has `HANDSHAKE_S` in all, whatever it sends, and is one of at most `UNPROVED_MAX`.
S3  Bytes that are not a frame of the expected type end the link, and affect nothing else.
S4  The size of a frame and the bytes that wait to be sent are bounded.
"""

import contextlib
import re
import select
import socket
import ssl
import struct
import time
from collections import deque
from typing import Generic, TypeVar

import msgspec

from argosy.core import ConfigError, DeadlinePassed, PeerLost
from argosy.fabric.link import FRAME_BYTES_MAX, UNSENT_BYTES_MAX, BadFrame, take_connection
from argosy.fabric.run_authority import HEAD, Credentials, member_name, tls_context

HANDSHAKE_S = 20.0
"""A machine under load needs long for a handshake."""
UNPROVED_MAX = 64
_HEADER = struct.Struct("<I")
_PART_BYTES = 1 << 16
_PARTS_MAX = 64
_USER_TIMEOUT_MS = 10_000

SentMessage = TypeVar("SentMessage")
_encoder = msgspec.msgpack.Encoder()


class TlsAddress(msgspec.Struct, frozen=True):
    """Where an agent listens for agents of other hosts; links within a host have the path of a Unix socket instead."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"tls://[{self.host}]:{self.port}" if ":" in self.host else f"tls://{self.host}:{self.port}"


def parse_address(text: str) -> TlsAddress:
    """Read `tls://HOST:PORT`.

    Raises:
        ConfigError: it looks different.
    """
    found = re.fullmatch(r"tls://(?:\[([^\]]+)\]|([^:\[\]/]+)):(\d{1,5})", text)
    if found is None or int(found[3]) > 65535:
        raise ConfigError(f"an address must look like tls://host:port: {text!r}")
    return TlsAddress(found[1] or found[2], int(found[3]))


class SecureLink(Generic[SentMessage]):
    """One end of a connection whose other end has proved to be `peer`; `SentMessage` is what that may send."""

    def __init__(self, sock: ssl.SSLSocket, decoder: "msgspec.msgpack.Decoder[SentMessage]", peer: str) -> None:
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)
        self._sock, self._decoder, self.peer = sock, decoder, peer
        self.own_address: str = sock.getsockname()[0]
        """The address of this host under which the peer sees it."""
        self._received, self._unsent = bytearray(), bytearray()
        self._ready: deque[SentMessage] = deque()

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def wants_write(self) -> bool:
        return bool(self._unsent)

    def send(self, message: object) -> None:
        """Queue `message` and send what the socket accepts now.

        Raises:
            PeerLost: the peer is gone, or reads so slowly that the queue reached its bound.
        """
        self.queue(message)
        self.flush()

    def queue(self, message: object) -> None:
        """Send `message` with the next `flush`.

        Raises:
            PeerLost: the peer reads so slowly that the queue reached its bound.
        """
        payload = _encoder.encode(message)
        if len(payload) > FRAME_BYTES_MAX:
            raise ValueError(f"a frame holds at most {FRAME_BYTES_MAX} bytes: {len(payload)}")
        if len(self._unsent) + len(payload) > UNSENT_BYTES_MAX:
            raise PeerLost(self.peer, f"it reads too slowly, {len(self._unsent)} bytes unsent")
        self._unsent += _HEADER.pack(len(payload)) + payload

    def flush(self) -> None:
        """Send what is queued until the socket is full."""
        while self._unsent:
            try:
                sent = self._sock.send(self._unsent[:_PART_BYTES])
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
                return
            except OSError as error:
                raise PeerLost(self.peer, f"connection failed: {error.strerror or error}") from None
            del self._unsent[:sent]

    def receive(self) -> list[SentMessage]:
        """Return the complete messages.

        Raises:
            PeerLost: the connection ended, and everything that arrived was returned before.
            BadFrame: the bytes are not a message of this link (S3).
        """
        closed = self._fill()
        while (message := self._next()) is not None:
            self._ready.append(message)
        if closed and not self._ready:
            raise PeerLost(self.peer, "it closed the connection")
        messages = list(self._ready)
        self._ready.clear()
        return messages

    def wait(self, timeout_s: float) -> SentMessage:
        """Block until a message arrives, and send what is queued meanwhile.

        Raises:
            DeadlinePassed: nothing arrived within `timeout_s`.
            PeerLost, BadFrame: as `receive`.
        """
        deadline = time.monotonic() + timeout_s
        while not self._ready:
            left = deadline - time.monotonic()
            if left < 0:
                raise DeadlinePassed(f"waiting for an answer from {self.peer}", timeout_s)
            poller = select.poll()
            poller.register(self._sock, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            if poller.poll(left * 1000):
                self.flush()
                self._ready.extend(self.receive())
        return self._ready.popleft()

    def close(self) -> None:
        self._sock.close()

    def _fill(self) -> bool:
        """Read what has arrived; True if the connection ended."""
        parts = 0
        while parts < _PARTS_MAX or self._sock.pending():  # What TLS has buffered does not poll as readable.
            parts += 1
            try:
                data = self._sock.recv(_PART_BYTES)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return False
            except OSError:
                return True
            if not data:
                return True
            self._received += data
        return False

    def _next(self) -> SentMessage | None:
        if len(self._received) < _HEADER.size:
            return None
        (size,) = _HEADER.unpack_from(self._received)
        if size > FRAME_BYTES_MAX:
            raise BadFrame(f"{self.peer} sent a frame of {size} bytes")
        end = _HEADER.size + size
        if len(self._received) < end:
            return None
        payload = bytes(self._received[_HEADER.size : end])
        del self._received[:end]
        try:
            return self._decoder.decode(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise BadFrame(f"{self.peer} sent an unexpected message: {error}") from None


class SecureListener:
    """Accepts members of one run. Register it for reading, and call `accept` when it is readable and now and then."""

    def __init__(self, listener: socket.socket, credentials: Credentials, handshake_s: float = HANDSHAKE_S) -> None:
        listener.setblocking(False)
        self._handshake_s = handshake_s
        self._listener, self._run = listener, credentials.run
        self._context = tls_context(credentials)
        self._unproved: dict[int, tuple[ssl.SSLSocket, float]] = {}
        self._poll = select.epoll()
        self._poll.register(listener, select.EPOLLIN)

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    @property
    def unproved(self) -> int:
        """How many connections have not proved who they are yet."""
        return len(self._unproved)

    def fileno(self) -> int:
        return self._poll.fileno()

    def accept(self) -> list[tuple[ssl.SSLSocket, str]]:
        """Carry connections on; returns those that have proved which member they are (S1). Never blocks."""
        proved: list[tuple[ssl.SSLSocket, str]] = []
        for fd, _ in self._poll.poll(0):
            if fd == self._listener.fileno():
                self._take()
            elif (name := self._greet(fd)) is not None:
                proved.append((self._unproved.pop(fd)[0], name))
        now = time.monotonic()
        for fd in [fd for fd, (_, until) in self._unproved.items() if now > until]:  # S2
            self._drop(fd)
        return proved

    def close(self) -> None:
        for fd in list(self._unproved):
            self._drop(fd)
        self._poll.close()
        self._listener.close()

    def _take(self) -> None:
        """Take one waiting connection; if there are too many that prove nothing, the oldest gives way (S2)."""
        with contextlib.suppress(OSError):
            if (sock := take_connection(self._listener)) is None:
                return
            if len(self._unproved) >= UNPROVED_MAX:
                self._drop(next(iter(self._unproved)))
            sock.setblocking(False)
            with sock:  # If it ended meanwhile; wrapping takes its descriptor.
                secure = self._context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            self._unproved[secure.fileno()] = secure, time.monotonic() + self._handshake_s
            self._poll.register(secure, select.EPOLLIN)

    def _greet(self, fd: int) -> str | None:
        """Carry a handshake on; the peer's name when it is complete."""
        secure, _ = self._unproved[fd]
        try:
            secure.do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None
        except (OSError, ValueError):
            self._drop(fd)
            return None
        name = member_name(secure, self._run)
        if not name or name == HEAD:
            self._drop(fd)
            return None
        self._poll.unregister(fd)
        return name

    def _drop(self, fd: int) -> None:
        secure, _ = self._unproved.pop(fd)
        with contextlib.suppress(OSError):
            self._poll.unregister(fd)
        secure.close()


def listen_secure(address: TlsAddress) -> socket.socket:
    """Open a port for agents of other hosts; port 0 takes a free one.

    Raises:
        OSError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    return socket.create_server((address.host, address.port), family=family, backlog=1024)


def connect_secure(
    address: TlsAddress,
    credentials: Credentials,
    decoder: "msgspec.msgpack.Decoder[SentMessage]",
    timeout_s: float = HANDSHAKE_S,
) -> SecureLink[SentMessage]:
    """Connect to the head of the run, which proves to be that.

    Raises:
        PeerLost: it cannot be reached, or something else listens there.
    """
    peer = f"the head of the run at {address}"
    try:
        plain = socket.create_connection((address.host, address.port), timeout=timeout_s)
    except OSError as error:
        raise PeerLost(peer, f"cannot connect: {error.strerror or error}") from None
    try:
        secure = tls_context(credentials).wrap_socket(plain, server_hostname=None)
    except OSError as error:
        plain.close()
        raise PeerLost(peer, f"handshake failed: {error.strerror or error}") from None
    if member_name(secure, credentials.run) != HEAD:
        secure.close()
        raise PeerLost(peer, f"it is not the head of run {credentials.run}")
    return SecureLink(secure, decoder, peer)
