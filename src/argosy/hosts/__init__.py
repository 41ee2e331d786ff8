"""Where the hosts of a run come from. An engine owns them; this room has it start one agent on each."""

from typing import TYPE_CHECKING

from argosy._lazy import lazy

if TYPE_CHECKING:
    from argosy.hosts.engines import HostEngine as HostEngine
    from argosy.hosts.engines import find_engine as find_engine

__getattr__, __all__ = lazy(__name__)  # pyright: ignore[reportUnsupportedDunderAll]
