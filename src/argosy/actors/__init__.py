"""Meshes of ranks that are called like objects."""

from typing import TYPE_CHECKING

from argosy._lazy import lazy

if TYPE_CHECKING:
    from argosy.actors.cluster import Cluster as Cluster
    from argosy.actors.cluster import connect as connect
    from argosy.actors.cluster import local as local
    from argosy.actors.cluster import serve as serve
    from argosy.actors.mesh import Mesh as Mesh
    from argosy.actors.readiness import Answers as Answers
    from argosy.actors.readiness import LogLine as LogLine
    from argosy.actors.readiness import Tcp as Tcp
    from argosy.actors.server import endpoint as endpoint

__getattr__, __all__ = lazy(__name__)  # pyright: ignore[reportUnsupportedDunderAll]
