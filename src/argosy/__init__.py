"""Argosy runs your PyTorch script, keeps it running through failures, and tells you why it is slow or broken.

Importing this package only defines names; each is resolved when first used.
"""

from typing import TYPE_CHECKING

from argosy._lazy import lazy

if TYPE_CHECKING:
    from argosy.actors import Answers as Answers
    from argosy.actors import Cluster as Cluster
    from argosy.actors import LogLine as LogLine
    from argosy.actors import Mesh as Mesh
    from argosy.actors import Tcp as Tcp
    from argosy.actors import connect as connect
    from argosy.actors import endpoint as endpoint
    from argosy.actors import local as local
    from argosy.actors import serve as serve
    from argosy.checkpoint import CorruptShard as CorruptShard
    from argosy.checkpoint import restore as restore
    from argosy.control import Restart as Restart
    from argosy.core import ArgosyError as ArgosyError
    from argosy.core import ConfigError as ConfigError
    from argosy.core import DeadlinePassed as DeadlinePassed
    from argosy.core import PeerLost as PeerLost
    from argosy.fabric import RemoteError as RemoteError
    from argosy.fabric import here as here
    from argosy.graph import compile as compile
    from argosy.insight import open_run as open_run
    from argosy.train import Run as Run

__version__ = "0.1.0"

__getattr__, __all__ = lazy(__name__)  # pyright: ignore[reportUnsupportedDunderAll]
