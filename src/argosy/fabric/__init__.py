"""Messages between the processes of one user: framed links over Unix sockets, calls, and which rank this process is.

The modules of calls are imported on first use, because most processes never call.
"""

from typing import TYPE_CHECKING

from argosy._lazy import lazy
from argosy.fabric.host_identity import host_id
from argosy.fabric.link import FDS_MAX, BadFrame, Link, accept, connect, listen, peer_credentials
from argosy.fabric.paths import cache_dir, runtime_dir, shared_memory_dir, shared_memory_path, state_dir, sync_directory
from argosy.fabric.rank_place import Arrive, Assist, Released, here

if TYPE_CHECKING:
    from argosy.fabric.calls import Alive as Alive
    from argosy.fabric.calls import Callee as Callee
    from argosy.fabric.calls import Caller as Caller
    from argosy.fabric.calls import Fate as Fate
    from argosy.fabric.calls import Gone as Gone
    from argosy.fabric.frames import CANCELLED as CANCELLED
    from argosy.fabric.frames import LATE as LATE
    from argosy.fabric.frames import RAISED as RAISED
    from argosy.fabric.frames import Call as Call
    from argosy.fabric.frames import Frame as Frame
    from argosy.fabric.frames import PackedValue as PackedValue
    from argosy.fabric.frames import ReplyFrame as ReplyFrame
    from argosy.fabric.payload import dump as dump
    from argosy.fabric.payload import load as load
    from argosy.fabric.peer import Peer as Peer
    from argosy.fabric.peer_registry import find_peer as find_peer
    from argosy.fabric.peer_registry import forget_peers as forget_peers
    from argosy.fabric.pending_call import PendingCall as PendingCall
    from argosy.fabric.pending_call import context as context
    from argosy.fabric.remote_errors import RemoteError as RemoteError
    from argosy.fabric.remote_errors import rebuild as rebuild
    from argosy.fabric.server import Server as Server

__getattr__, _lazy_names = lazy(__name__)
__all__ = [  # pyright: ignore[reportUnsupportedDunderAll]
    "FDS_MAX",
    "Arrive",
    "Assist",
    "BadFrame",
    "Link",
    "Released",
    "accept",
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
    *_lazy_names,
]
