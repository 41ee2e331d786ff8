"""Choose the plan of a source."""

from typing import Any

from argosy.data.order import Shuffle
from argosy.data.pack import Pack, PackPlan
from argosy.data.plan import MapPlan, Mix, MixPlan, SourcePlan
from argosy.data.shards import ShardPlan, Shards


def choose_plan(source: Any, shuffle: Shuffle, seed: int) -> SourcePlan:
    """Return the plan by which `source` is loaded."""
    if isinstance(source, Mix):
        return MixPlan(source, seed)
    if isinstance(source, Pack):
        return PackPlan(source, shuffle, seed)
    if isinstance(source, Shards):
        return ShardPlan(source)
    return MapPlan(source, shuffle, seed)
