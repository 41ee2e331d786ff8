"""Meshes of ranks that are called like objects."""

from typing import TYPE_CHECKING

from argosy._lazy import lazy

if TYPE_CHECKING:
    from argosy.actors.cluster import Cluster as Cluster
    from argosy.actors.cluster import connect as connect
    from argosy.actors.cluster import local as local
    from argosy.actors.cluster import serve as serve
    from argosy.actors.events import MeshEvent as MeshEvent
    from argosy.actors.handles import Actor as Actor
    from argosy.actors.handles import Actors as Actors
    from argosy.actors.mesh import Mesh as Mesh
    from argosy.actors.readiness import Answers as Answers
    from argosy.actors.readiness import LogLine as LogLine
    from argosy.actors.readiness import Tcp as Tcp
    from argosy.actors.replies import Replies as Replies
    from argosy.actors.replies import Reply as Reply
    from argosy.actors.server import endpoint as endpoint

__getattr__, __all__ = lazy(__name__)  # pyright: ignore[reportUnsupportedDunderAll]
