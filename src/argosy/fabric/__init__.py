"""Messages between the processes of one user: framed links over Unix sockets, calls, and a rank's own place.

What calls need (pickling above all) is imported when first asked for: most processes never call.
"""

from typing import TYPE_CHECKING

from argosy._lazy import lazy
from argosy.fabric.here import Arrive, Assist, Place, Released, here
from argosy.fabric.host import host_id
from argosy.fabric.link import FDS_MAX, BadFrame, Link, accept, connect, listen, peer_credentials
from argosy.fabric.paths import (
    build_id,
    cache_dir,
    runtime_dir,
    shared_memory_dir,
    shared_memory_path,
    state_dir,
    sync_directory,
)

if TYPE_CHECKING:
    from argosy.fabric.calls import Alive as Alive
    from argosy.fabric.calls import Callee as Callee
    from argosy.fabric.calls import Caller as Caller
    from argosy.fabric.calls import Fate as Fate
    from argosy.fabric.calls import Gone as Gone
    from argosy.fabric.failures import Cancelled as Cancelled
    from argosy.fabric.failures import Failure as Failure
    from argosy.fabric.failures import RemoteError as RemoteError
    from argosy.fabric.failures import rebuild as rebuild
    from argosy.fabric.frames import CANCELLED as CANCELLED
    from argosy.fabric.frames import LATE as LATE
    from argosy.fabric.frames import RAISED as RAISED
    from argosy.fabric.frames import RESULT as RESULT
    from argosy.fabric.frames import Body as Body
    from argosy.fabric.frames import Call as Call
    from argosy.fabric.frames import Frame as Frame
    from argosy.fabric.frames import Parcel as Parcel
    from argosy.fabric.frames import Reply as Reply
    from argosy.fabric.payload import dump as dump
    from argosy.fabric.payload import load as load
    from argosy.fabric.peer import Peer as Peer
    from argosy.fabric.peers import find_peer as find_peer
    from argosy.fabric.peers import forget_peers as forget_peers
    from argosy.fabric.server import Server as Server
    from argosy.fabric.ticket import Ticket as Ticket
    from argosy.fabric.ticket import context as context

_CALLS = {
    name: f"argosy.fabric.{module}"
    for module, names in {
        "calls": "Alive Callee Caller Fate Gone",
        "failures": "Cancelled Failure RemoteError rebuild",
        "frames": "CANCELLED LATE RAISED RESULT Body Call Frame Parcel Reply",
        "payload": "dump load",
        "peer": "Peer",
        "peers": "find_peer forget_peers",
        "server": "Server",
        "ticket": "Ticket context",
    }.items()
    for name in names.split()
}

__getattr__, _late = lazy(__name__, _CALLS)
__all__ = [  # pyright: ignore[reportUnsupportedDunderAll]
    "FDS_MAX",
    "Arrive",
    "Assist",
    "BadFrame",
    "Link",
    "Place",
    "Released",
    "accept",
    "build_id",
    "cache_dir",
    "connect",
    "here",
    "host_id",
    "listen",
    "peer_credentials",
    "runtime_dir",
    "shared_memory_dir",
    "shared_memory_path",
    "state_dir",
    "sync_directory",
    *_late,
]
