"""Messages between the processes of one user: links over Unix sockets and TLS, calls, and which rank this process is.

The modules of calls are imported on first use, because most processes never call.
"""

from typing import TYPE_CHECKING

from argosy._lazy import lazy
from argosy.fabric.agent_board import AgentBoard as AgentBoard
from argosy.fabric.agent_board import BoardAdd as BoardAdd
from argosy.fabric.agent_board import BoardAnswer as BoardAnswer
from argosy.fabric.agent_board import BoardGet as BoardGet
from argosy.fabric.agent_board import BoardSet as BoardSet
from argosy.fabric.host_identity import host_id as host_id
from argosy.fabric.link import FDS_MAX as FDS_MAX
from argosy.fabric.link import BadFrame as BadFrame
from argosy.fabric.link import Link as Link
from argosy.fabric.link import accept as accept
from argosy.fabric.link import connect as connect
from argosy.fabric.link import listen as listen
from argosy.fabric.link import peer_credentials as peer_credentials
from argosy.fabric.paths import cache_dir as cache_dir
from argosy.fabric.paths import made_directories as made_directories
from argosy.fabric.paths import make_runtime as make_runtime
from argosy.fabric.paths import runtime_dir as runtime_dir
from argosy.fabric.paths import shared_memory_dir as shared_memory_dir
from argosy.fabric.paths import shared_memory_path as shared_memory_path
from argosy.fabric.paths import state_dir as state_dir
from argosy.fabric.paths import sync_directory as sync_directory
from argosy.fabric.rank_place import Arrive as Arrive
from argosy.fabric.rank_place import ForkHelper as ForkHelper
from argosy.fabric.rank_place import NotMember as NotMember
from argosy.fabric.rank_place import RankPlace as RankPlace
from argosy.fabric.rank_place import Released as Released
from argosy.fabric.rank_place import Replaced as Replaced
from argosy.fabric.rank_place import here as here

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
    from argosy.fabric.frames import CallFrame as CallFrame
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
    from argosy.fabric.run_authority import HEAD as HEAD
    from argosy.fabric.run_authority import Credentials as Credentials
    from argosy.fabric.run_authority import RunAuthority as RunAuthority
    from argosy.fabric.run_authority import create_authority as create_authority
    from argosy.fabric.secure_link import SecureLink as SecureLink
    from argosy.fabric.secure_link import SecureListener as SecureListener
    from argosy.fabric.secure_link import TlsAddress as TlsAddress
    from argosy.fabric.secure_link import connect_secure as connect_secure
    from argosy.fabric.secure_link import listen_secure as listen_secure
    from argosy.fabric.secure_link import parse_address as parse_address
    from argosy.fabric.server import Server as Server

__getattr__, _ = lazy(__name__)
