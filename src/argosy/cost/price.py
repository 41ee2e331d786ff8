"""What one operation or collective costs on a chip, and how sure that is.

Three tiers: a curve of the chip was measured there (measured), between or near its points (interpolated), or the
roofline of published peaks times an efficiency (roofline). Pure.

P1  More bandwidth, more operations per second or less latency never makes anything slower.
"""

import bisect
import math
from dataclasses import dataclass

from argosy.cost.chip import Chip, LinkLevel
from argosy.cost.recipe import Recipe
from argosy.cost.trace import Collective, Op

SPREAD = {"measured": 0.03, "interpolated": 0.10, "roofline": 0.25}
"""The standard deviation of a price, as a share of it, by tier."""
STEPS = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1}
"""How often a ring carries the payload around."""
DIMS = ("tp", "fsdp", "dp", "pp")
"""Innermost first: neighbours in rank differ in tp."""


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds, and where they come from."""

    seconds: float
    tier: str

    @property
    def spread(self) -> float:
        return SPREAD[self.tier]


def price_op(op: Op, chip: Chip) -> Price:
    """The time of an operation that is no collective."""
    if op.kind == "view":
        return Price(0.0, "measured")
    curve = chip.curves.get("matmul" if op.kind in ("matmul", "attention") else "memory")
    work = op.flops if op.kind in ("matmul", "attention") else op.bytes
    if curve and work > 0:
        seconds, tier = read_curve(curve, work)
        moved = op.bytes / chip.memory_bandwidth if op.kind == "matmul" else 0.0
        return Price(max(seconds, moved, chip.launch_s), tier)
    share = chip.attention if op.kind == "attention" else chip.matmul
    compute = op.flops / (chip.peak(op.dtype) * share)
    moved = op.bytes / (chip.memory_bandwidth * chip.memory)
    return Price(max(compute, moved, chip.launch_s), "roofline")


def read_curve(curve: tuple[tuple[float, float], ...], work: float) -> tuple[float, str]:
    """Interpolate seconds between measured points, in logarithms; beyond the ends the rate stays."""
    places = [point[0] for point in curve]
    index = bisect.bisect_left(places, work)
    if index < len(curve) and curve[index][0] == work:
        return curve[index][1], "measured"
    if index == 0:
        return curve[0][1], "interpolated"
    if index == len(curve):
        return curve[-1][1] * work / curve[-1][0], "interpolated"
    (x0, y0), (x1, y1) = curve[index - 1], curve[index]
    share = math.log(work / x0) / math.log(x1 / x0)
    return y0 * (y1 / y0) ** share, "interpolated"


def price_collective(collective: Collective, recipe: Recipe, chip: Chip) -> Price:
    """The time of a collective over one dimension of the recipe, by ring or tree, whichever is faster."""
    ranks = int(getattr(recipe, collective.dim))
    if ranks == 1 or collective.bytes == 0:
        return Price(0.0, "measured")
    curve = chip.curves.get(f"{collective.kind}_{ranks}") or chip.curves.get(collective.kind)
    if curve:
        return Price(*read_curve(curve, collective.bytes))
    crossed = levels(collective.dim, recipe, chip)
    seconds = sum(level_time(collective.kind, collective.bytes, *level) for level in crossed)
    return Price(seconds, "roofline")


def levels(dim: str, recipe: Recipe, chip: Chip) -> list[tuple[int, float, float]]:
    """The links that the ranks of a dimension cross, innermost first: how many take part, bandwidth, latency.

    Ranks of a group that share a host carry a message to other hosts together: their ports add up.
    """
    stride = math.prod(int(getattr(recipe, inner)) for inner in DIMS[: DIMS.index(dim)])
    left, found, inside = int(getattr(recipe, dim)), list[tuple[int, float, float]](), 1
    for link in chip.links:
        here = left if link.ranks == 0 else min(left, max(1, link.ranks // (stride * inside)))
        if here > 1:
            found.append((here, link.bandwidth * inside, link.latency_s))
            left = -(-left // here)
            inside *= here
        if left == 1:
            break
    return found


def level_time(kind: str, bytes_: float, ranks: int, bandwidth: float, latency_s: float) -> float:
    """The faster of ring and tree."""
    steps = STEPS[kind]
    ring = steps * ((ranks - 1) * latency_s + (ranks - 1) / ranks * bytes_ / bandwidth)
    tree = steps * (math.ceil(math.log2(ranks)) * latency_s + bytes_ / bandwidth)
    return min(ring, tree)


def hop_time(bytes_: float, recipe: Recipe, chip: Chip) -> float:
    """The time to hand activations to the next pipeline stage."""
    stride = recipe.tp * recipe.fsdp * recipe.dp
    link: LinkLevel = next(each for each in chip.links if each.ranks == 0 or each.ranks > stride)
    return link.latency_s + bytes_ / link.bandwidth
