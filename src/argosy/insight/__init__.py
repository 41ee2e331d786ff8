"""Where every second of a run went: its records, the ledger, verdicts, reports, comparisons.

Pure functions over what `observe` recorded; nothing here is part of a training. Names are imported when first used.
"""

from typing import TYPE_CHECKING

from argosy._lazy import lazy

if TYPE_CHECKING:
    from argosy.insight.store import RunData as RunData
    from argosy.insight.store import load_run as load_run

__getattr__, __all__ = lazy(__name__)  # pyright: ignore[reportUnsupportedDunderAll]
