"""Which plan a source gets."""

from typing import Any

from argosy.data.order import Shuffle
from argosy.data.packing import Pack, PackPlan
from argosy.data.plan import MapPlan, Mix, MixPlan, Plan
from argosy.data.shards import ShardPlan, Shards


def plan_of(source: Any, shuffle: Shuffle, seed: int) -> Plan:
    """Return the order in which `source` is loaded."""
    if isinstance(source, Mix):
        return MixPlan(source, seed)
    if isinstance(source, Pack):
        return PackPlan(source, shuffle, seed)
    if isinstance(source, Shards):
        return ShardPlan(source)
    return MapPlan(source, shuffle, seed)
