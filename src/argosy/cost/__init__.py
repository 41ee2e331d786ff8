"""Prices: chips and links by file, what each operation and collective costs, and how a step unfolds in time."""

from typing import TYPE_CHECKING

from argosy._lazy import lazy

if TYPE_CHECKING:
    from argosy.cost.recipe import Recipe as Recipe

__getattr__, __all__ = lazy(__name__)  # pyright: ignore[reportUnsupportedDunderAll]
