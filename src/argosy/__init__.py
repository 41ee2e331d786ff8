"""Argosy runs your PyTorch script, keeps it running through failures, and tells you why it is slow or broken.

Importing this package only defines names; each is resolved when first used.
"""

from typing import TYPE_CHECKING

from argosy._lazy import lazy

if TYPE_CHECKING:
    from argosy.checkpoint import CorruptShard as CorruptShard
    from argosy.checkpoint import restore as restore
    from argosy.core import ArgosyError as ArgosyError
    from argosy.core import ConfigError as ConfigError
    from argosy.core import DeadlinePassed as DeadlinePassed
    from argosy.core import PeerLost as PeerLost
    from argosy.fabric import RemoteError as RemoteError
    from argosy.fabric import here as here
    from argosy.graph import compile as compile
    from argosy.process import Answers as Answers
    from argosy.process import Cluster as Cluster
    from argosy.process import LogLine as LogLine
    from argosy.process import Mesh as Mesh
    from argosy.process import Restart as Restart
    from argosy.process import Tcp as Tcp
    from argosy.process import connect as connect
    from argosy.process import endpoint as endpoint
    from argosy.process import local as local
    from argosy.process import serve as serve
    from argosy.train import Run as Run

__version__ = "0.1.0"

__getattr__, __all__ = lazy(__name__)  # pyright: ignore[reportUnsupportedDunderAll]
