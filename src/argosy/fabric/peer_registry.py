"""The peers of this process: one link per rank that it calls, shared by its threads. A forked child has none."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

from argosy.fabric.calls import AskFate
from argosy.fabric.peer import Peer
from argosy.fabric.pending_call import CallContext, context

_peers: dict[Path, Peer] = {}
_peers_lock = threading.Lock()


def find_peer(path: Path, name: str, ask_fate: Callable[[], AskFate]) -> Peer:
    """Return this process's link to the rank that listens at `path`."""
    with _peers_lock:
        peer = _peers.get(path)
        if peer is None:
            peer = _peers[path] = Peer(path, name, ask_fate())
        return peer


def forget_peers(folder: Path, cause: str) -> None:
    """Close the links to all ranks that listen in `folder`; calls in flight are lost with `cause`."""
    with _peers_lock:
        chosen = [_peers.pop(path) for path in list(_peers) if path.parent == folder]
    for peer in chosen:
        peer.close(cause)


def _forget_in_child() -> None:
    global _peers_lock
    _peers_lock = threading.Lock()
    context.call = CallContext()
    for peer in _peers.values():
        peer.forget()


os.register_at_fork(after_in_child=_forget_in_child)
