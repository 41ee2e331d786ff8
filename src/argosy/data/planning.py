"""Which plan a source gets."""

from typing import Any

from argosy.data.order import Shuffle
from argosy.data.plan import MapPlan, Mix, MixPlan, Plan


def plan_of(source: Any, shuffle: Shuffle, seed: int) -> Plan:
    """Return the order in which `source` is loaded."""
    if isinstance(source, Mix):
        return MixPlan(source, seed)
    return MapPlan(source, shuffle, seed)
