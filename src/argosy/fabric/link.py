"""Framed messages and descriptors over Unix sockets, between processes of one user.

A frame is eight bytes (payload length, number of descriptors) and a msgpack payload; descriptors travel as
SCM_RIGHTS with its first byte. Sockets never block: `send` queues what does not fit, `receive` returns complete
messages, and `wait`, the only method that sleeps, takes a deadline.

L1  A peer of another user is refused before a byte is read.
L2  Bytes that are not a frame of the expected type end the link, and affect nothing else.
L3  The size of a frame and the queue of unsent frames are bounded.
"""

import array
import contextlib
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from itertools import islice, takewhile
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from argosy.core import ArgosyError, DeadlinePassed, PeerLost

_HEADER = struct.Struct("<II")
_CREDENTIALS = struct.Struct("3i")
FRAME_BYTES_MAX = 16 << 20
UNSENT_BYTES_MAX = 64 << 20
FDS_MAX = 64
_RECEIVE_BYTES = 1 << 18
_TRUNCATED = int(socket.MSG_CTRUNC)
_BATCH = 64

Message = TypeVar("Message")
_encoder = msgspec.msgpack.Encoder()
_spare: int | None = None
"""A reserved descriptor. When no other is left, it is closed for a moment, to accept a peer and refuse it."""


class BadFrame(ArgosyError):
    """The peer sent bytes that are not a message of this link."""


class Link(Generic[Message]):
    """One end of a connection; `Message` is the union of what the other end may send."""

    def __init__(self, sock: socket.socket, decoder: "msgspec.msgpack.Decoder[Message]", peer: str) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._decoder = decoder
        self.peer = peer
        self._received = bytearray()
        self._received_fds: deque[int] = deque()
        self._unsent: deque[tuple[bytes, list[int]]] = deque()
        self._unsent_bytes = 0
        self._ready: deque[tuple[Message, list[int]]] = deque()

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def peer_pid(self) -> int:
        """The process at the other end."""
        return peer_credentials(self._sock)[0]

    @property
    def wants_write(self) -> bool:
        return bool(self._unsent)

    def send(self, message: object, fds: Sequence[int] = ()) -> None:
        """Queue `message` and send what the socket accepts now; descriptors are duplicated.

        Raises:
            PeerLost: the peer is gone, or reads so slowly that the queue reached its bound.
        """
        self.queue(message, fds)
        self.flush()

    def queue(self, message: object, fds: Sequence[int] = ()) -> None:
        """Send `message` with the next `flush`, so that many small messages cost one system call.

        Raises:
            PeerLost: the peer reads so slowly that the queue reached its bound.
        """
        payload = _encoder.encode(message)
        if len(payload) > FRAME_BYTES_MAX:
            raise ValueError(f"a frame holds at most {FRAME_BYTES_MAX} bytes: {len(payload)}")
        if self._unsent_bytes + len(payload) > UNSENT_BYTES_MAX:
            raise PeerLost(self.peer, f"it reads too slowly, {self._unsent_bytes} bytes unsent")
        frame = _HEADER.pack(len(payload), len(fds)) + payload
        self._unsent.append((frame, [os.dup(fd) for fd in fds]))
        self._unsent_bytes += len(frame)

    def flush(self) -> None:
        """Send queued frames until the socket is full."""
        while self._unsent:
            data, fds = self._unsent[0]  # Only the first of a batch may carry descriptors.
            plain = takewhile(lambda frame: not frame[1], islice(self._unsent, 1, _BATCH))
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            try:
                sent = self._sock.sendmsg([data, *(more for more, _ in plain)], rights, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError as error:
                raise PeerLost(self.peer, f"connection failed: {error.strerror}") from None
            for fd in fds:
                os.close(fd)
            self._unsent_bytes -= sent
            while sent:
                data, _ = self._unsent.popleft()
                if sent < len(data):
                    self._unsent.appendleft((data[sent:], []))
                sent -= min(sent, len(data))

    def receive(self) -> list[tuple[Message, list[int]]]:
        """Return the complete messages with their descriptors, which the caller then owns.

        Raises:
            PeerLost: the peer closed the connection, and everything it sent was returned before.
            BadFrame: the bytes are not a message of this link (L2).
        """
        closed = self._fill()
        while (message := self._next()) is not None:
            self._ready.append(message)
        if closed and not self._ready:
            raise PeerLost(self.peer, "it closed the connection")
        messages = list(self._ready)
        self._ready.clear()
        return messages

    def wait(self, timeout_s: float) -> tuple[Message, list[int]]:
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
            poller.register(self, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            if poller.poll(left * 1000):
                self.flush()
                self._ready.extend(self.receive())
        return self._ready.popleft()

    @property
    def has_messages(self) -> bool:
        """Whether `wait` has left messages for `receive`: the socket does not poll as readable for them."""
        return bool(self._ready)

    def forget(self) -> None:
        """Drop the descriptors without closing them: a forked child has closed them or never owned them."""
        self._sock.detach()
        self._received_fds.clear()
        self._unsent.clear()
        self._ready.clear()

    def close(self) -> None:
        """Close the socket and every descriptor that the caller does not own yet."""
        self._sock.close()
        for fds in [self._received_fds, *(fds for _, fds in self._unsent), *(fds for _, fds in self._ready)]:
            for fd in fds:
                os.close(fd)
        self._received_fds.clear()
        self._unsent.clear()
        self._ready.clear()

    def _fill(self) -> bool:
        """Read what the socket holds; True if the peer closed the connection."""
        for _ in range(64):  # Bounds the turn of one peer; the rest is read in the next turn.
            try:
                data, ancillary, flags, _ = self._sock.recvmsg(_RECEIVE_BYTES, socket.CMSG_SPACE(4 * FDS_MAX))
            except BlockingIOError:
                return False
            except OSError:
                return True
            keep_descriptors(ancillary, flags, self._received_fds, self.peer)
            if not data:
                return True
            self._received += data
        return False

    def _next(self) -> tuple[Message, list[int]] | None:
        if len(self._received) < _HEADER.size:
            return None
        size, fd_count = _HEADER.unpack_from(self._received)
        if size > FRAME_BYTES_MAX or fd_count > FDS_MAX:
            raise BadFrame(f"{self.peer} sent a frame of {size} bytes and {fd_count} descriptors")
        end = _HEADER.size + size
        if len(self._received) < end or len(self._received_fds) < fd_count:
            return None
        payload = bytes(self._received[_HEADER.size : end])
        del self._received[:end]
        fds = [self._received_fds.popleft() for _ in range(fd_count)]
        try:
            return self._decoder.decode(payload), fds
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            for fd in fds:
                os.close(fd)
            raise BadFrame(f"{self.peer} sent an unexpected message: {error}") from None


def keep_descriptors(ancillary: list[tuple[int, int, bytes]], flags: int, fds: deque[int], peer: str) -> None:
    """Append the descriptors that arrived with some bytes to `fds`.

    Raises:
        BadFrame: some were lost.
    """
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array.array("i", content[: len(content) - len(content) % 4])
            for fd in numbers:
                os.set_inheritable(fd, False)
            fds.extend(numbers)
    if flags & _TRUNCATED:
        raise BadFrame(f"descriptors from {peer} were truncated")


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """Return the pid and user id of the process at the other end."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def enlarge_buffers(sock: socket.socket) -> None:
    """Give a socket room for large messages, as far as the kernel allows."""
    with contextlib.suppress(OSError):
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, 1 << 20)


def listen(path: Path) -> socket.socket:
    """Listen at `path`, replacing a stale socket; only the owner may connect."""
    global _spare
    if _spare is None:
        _spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    sock.bind(str(path))
    path.chmod(0o600)
    sock.listen(1024)
    return sock


def accept(listener: socket.socket) -> socket.socket | None:
    """Accept one connection; None if there is none, or if it is another user's (L1).

    Raises:
        OSError: no descriptor is left; the peer was refused, so that it does not wait.
    """
    sock = take_connection(listener)
    if sock is not None and peer_credentials(sock)[1] != os.getuid():
        sock.close()
        return None
    return sock


def take_connection(listener: socket.socket) -> socket.socket | None:
    """Accept one connection, from any user; None if there is none.

    Raises:
        OSError: no descriptor is left; the peer was refused, so that it does not wait.
    """
    try:
        return listener.accept()[0]
    except (BlockingIOError, ConnectionAbortedError):
        return None
    except OSError:
        _refuse(listener)
        raise


def _refuse(listener: socket.socket) -> None:
    """Accept and close a connection, by means of the reserved descriptor."""
    global _spare
    if _spare is not None:
        os.close(_spare)
    with contextlib.suppress(OSError):
        listener.accept()[0].close()
    _spare = None
    with contextlib.suppress(OSError):
        _spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


def connect(
    path: Path, decoder: "msgspec.msgpack.Decoder[Message]", peer: str, timeout_s: float = 5.0
) -> Link[Message]:
    """Connect to the listener at `path`.

    Raises:
        PeerLost: nothing listens there, or another user does.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout_s)
    try:
        sock.connect(str(path))
        owner = peer_credentials(sock)[1]
    except OSError as error:
        sock.close()
        raise PeerLost(peer, f"cannot connect to {path}: {error.strerror or error}") from None
    if owner not in (os.getuid(), 0):
        sock.close()
        raise PeerLost(peer, f"{path} belongs to user {owner}, not to you")
    return Link(sock, decoder, peer)
