"""Argosy runs your PyTorch script, keeps it running through failures, and tells you why it is slow or broken.

Importing this package only defines names; each is resolved when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argosy.core import ArgosyError, ConfigError, DeadlinePassed, PeerLost
    from argosy.process import Restart

__version__ = "0.1.0"

_HOMES = {
    "ArgosyError": "argosy.core",
    "ConfigError": "argosy.core",
    "DeadlinePassed": "argosy.core",
    "PeerLost": "argosy.core",
    "Restart": "argosy.process",
}

__all__ = ["ArgosyError", "ConfigError", "DeadlinePassed", "PeerLost", "Restart", "__version__"]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'argosy' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
