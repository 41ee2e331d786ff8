"""Connections between ranks of a group on different hosts: they report that a peer ended or gave the group up.

They carry no tensors, which go through Gloo. A link carries lines of text: first the peer's rank, later why it gives
the group up, or that it leaves on purpose.
"""

import ipaddress
import os
import secrets
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from argosy.collective.peer_watcher import watcher
from argosy.core import ArgosyError, PeerLost

_LINE_MAX = 500
_ACCEPT_S = 0.02
_CONNECT_S = 10.0
_GUEST_S = 2.0
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))
_BYE, _GIVE_UP = "bye", "give up "


def own_address(store: Any) -> str:
    """Return the address from which this host reaches the store; its peers are expected to reach it there."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = getattr(store, "host", None) or socket.gethostname()
    with suppress(OSError):
        family, kind, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # Sends nothing: the kernel chooses the route.
            return str(probe.getsockname()[0])
    return "127.0.0.1"


class LinkListener:
    """Accepts connections of higher ranks that know its token; others are closed without an answer."""

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ipaddress.ip_address(address.split("%")[0]).version == 6 else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=1024)
        self._listener.settimeout(_ACCEPT_S)
        self._token = secrets.token_hex(16)
        self.address = f"{address} {self._listener.getsockname()[1]} {self._token}"

    def link(self, rank: int, addresses: Sequence[str], check: Callable[[], None]) -> dict[int, socket.socket]:
        """Connect to the lower ranks and accept the higher ones; `check` raises if that cannot succeed.

        Raises:
            ArgosyError: a peer cannot be reached.
        """
        links: dict[int, socket.socket] = {}
        try:
            with self._listener:
                for peer in range(rank):
                    links[peer] = _connect(peer, addresses[peer], rank)
                while len(links) < len(addresses) - 1:
                    try:
                        guest, _ = self._listener.accept()
                    except TimeoutError:
                        check()
                        continue
                    token, _, other = _first_line(guest).partition(b" ")
                    if secrets.compare_digest(token, self._token.encode()) and other.isdigit():
                        links[int(other)] = guest
                    else:
                        guest.close()
        except BaseException:
            for link in links.values():
                link.close()
            raise
        return links


def _connect(peer: int, full_address: str, rank: int) -> socket.socket:
    address, port, token = full_address.split()
    try:
        link = socket.create_connection((address, int(port)), _CONNECT_S)
    except OSError as error:
        raise ArgosyError(
            f"rank {peer} cannot be reached at {address}:{port}: {error}",
            hint="set MASTER_ADDR to an address that the other hosts can reach",
        ) from error
    link.sendall(f"{token} {rank}\n".encode())
    return link


def _first_line(guest: socket.socket) -> bytes:
    """Return the first line that a connection sends; empty if it sends none in time."""
    guest.settimeout(_GUEST_S)
    raw = b""
    with suppress(OSError):
        while not raw.endswith(b"\n") and len(raw) < _LINE_MAX and (more := guest.recv(1)):
            raw += more
    return raw.strip()


class Links:
    """The links of one rank in one generation; keeps the first loss that they report."""

    def __init__(self, links: dict[int, socket.socket], near: dict[int, int], ranks: Sequence[int]) -> None:
        """`near` are the pids of peers on this host, which are watched as processes, to learn how they end."""
        self._links, self._ranks, self._near = links, tuple(ranks), near
        self.on_loss: Callable[[], None] = lambda: None
        self._loss: ArgosyError | None = None
        self._lock = threading.Lock()
        self._read: dict[int, bytes] = {}
        self._watched_fds: dict[int, Callable[[], bool]] = {}
        self._watches = [watcher().watch(pid, partial(self._lose, rank)) for rank, pid in near.items()]
        _open.add(self)
        for rank, link in links.items():
            link.setblocking(False)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:  # A dead host does not close its connections.
                link.setsockopt(socket.IPPROTO_TCP, option, value)
            self._watched_fds[rank] = partial(self._hear, rank, link)
            watcher().watch_fd(link.fileno(), self._watched_fds[rank])

    def check(self) -> None:
        """Raise the loss, if there is one."""
        if self._loss is not None:
            raise self._loss

    def abort(self, cause: str) -> None:
        """Give the group up, here and on all ranks."""
        if self._keep(PeerLost("a rank of another group", cause)):
            self._tell(_GIVE_UP + " ".join(cause.split())[: _LINE_MAX - 20])

    def close(self) -> None:
        """Leave on purpose: the peers do not take the end of these links for a loss."""
        self._tell(_BYE)
        for watch in self._watches:
            watcher().forget(watch)
        for rank, link in self._links.items():
            watcher().unwatch_fd(link.fileno(), self._watched_fds[rank])
        self._watches = []
        self.drop()

    def drop(self) -> None:
        """Close this process's ends of the links, without a message."""
        for link in self._links.values():
            link.close()
        self._links = {}

    def _tell(self, line: str) -> None:
        for link in self._links.values():
            with suppress(OSError):
                link.send(line.encode() + b"\n")

    def _keep(self, loss: ArgosyError) -> bool:
        with self._lock:
            first, self._loss = self._loss is None, self._loss or loss
        return first

    def _lose(self, rank: int, cause: str) -> None:
        if self._keep(PeerLost(f"rank {self._ranks[rank]}", cause)):
            self.on_loss()

    def _hear(self, rank: int, link: socket.socket) -> bool:
        """Read a peer's lines, in the watcher's thread; False when the link has ended or is closed here."""
        if link.fileno() < 0:
            return False
        try:
            raw = link.recv(4096)
        except BlockingIOError:
            return True
        except OSError as error:
            raw, cause = b"", f"its connection broke: {error.strerror or error}"
        else:
            cause = "its connection closed"
        *lines, rest = (self._read.get(rank, b"") + raw).split(b"\n")
        self._read[rank] = rest[-_LINE_MAX:]
        for line in (line.decode(errors="replace") for line in lines):
            if line == _BYE:
                return False
            if line.startswith(_GIVE_UP) and self._keep(PeerLost("a rank of another group", line[len(_GIVE_UP) :])):
                self.on_loss()
        if not raw and rank not in self._near:
            self._lose(rank, cause)
        return bool(raw)


_open: "weakref.WeakSet[Links]" = weakref.WeakSet()


def _drop_all() -> None:
    for links in _open:
        links.drop()


# Otherwise a process that a rank forked would keep the rank's links open after its death.
os.register_at_fork(after_in_child=_drop_all)
