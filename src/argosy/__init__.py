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
    from argosy.process import Restart as Restart

__version__ = "0.1.0"

_HOMES = {
    "ArgosyError": "argosy.core",
    "ConfigError": "argosy.core",
    "CorruptShard": "argosy.checkpoint",
    "DeadlinePassed": "argosy.core",
    "PeerLost": "argosy.core",
    "Restart": "argosy.process",
    "restore": "argosy.checkpoint",
}

__getattr__, __all__ = lazy(__name__, _HOMES)  # pyright: ignore[reportUnsupportedDunderAll]
