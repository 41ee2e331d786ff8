"""Messages between the processes of one user: framed links over Unix sockets, and a rank's own place."""

from argosy.fabric.here import Arrive, Assist, Place, Released, here
from argosy.fabric.link import FDS_MAX, BadFrame, Link, accept, connect, listen, peer_credentials
from argosy.fabric.paths import build_id, cache_dir, runtime_dir, shared_memory_dir, shared_memory_path, state_dir

__all__ = [
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
    "listen",
    "peer_credentials",
    "runtime_dir",
    "shared_memory_dir",
    "shared_memory_path",
    "state_dir",
]
