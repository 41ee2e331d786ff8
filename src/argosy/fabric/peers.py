"""The links of this process: one per rank that it calls, shared by all of its threads, and none of a parent's."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

from argosy.fabric.calls import Oracle
from argosy.fabric.peer import Peer
from argosy.fabric.ticket import Doing, context

_peers: dict[Path, Peer] = {}
_peers_lock = threading.Lock()


def find_peer(path: Path, name: str, oracle: Callable[[], Oracle]) -> Peer:
    """The one link of this process to the rank that listens at `path`."""
    with _peers_lock:
        peer = _peers.get(path)
        if peer is None:
            peer = _peers[path] = Peer(path, name, oracle())
        return peer


def forget_peers(folder: Path, cause: str) -> None:
    """Close the links to all ranks that listen in `folder`; `cause` is what calls in flight are lost by."""
    with _peers_lock:
        chosen = [_peers.pop(path) for path in list(_peers) if path.parent == folder]
    for peer in chosen:
        peer.close(cause)


def _forget_in_child() -> None:
    global _peers_lock
    _peers_lock = threading.Lock()
    context.doing = Doing()
    for peer in _peers.values():
        peer.forget()


os.register_at_fork(after_in_child=_forget_in_child)
