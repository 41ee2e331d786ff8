"""Predict recipes for a training: capture few layers per shape of a rank's work, price them, rank the recipes."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from argosy.core import ArgosyError, ConfigError
from argosy.cost import Chip, Pieces, Prediction, Recipe, Trace, estimate, pieces, predict
from argosy.graph.errors import CannotCapture
from argosy.graph.lowering import lower
from argosy.graph.passes import regathered
from argosy.graph.simulate import world_of
from argosy.graph.step_capture import StepGraph, capture, capture_optimizer
from argosy.graph.training import Training

FEW, MORE = 2, 3
"""Layers that are captured; the rest of the model follows by extending the line."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A recipe that cannot be used, and why."""

    recipe: Recipe
    reason: str


@dataclass(frozen=True, slots=True)
class Captured:
    """The traces of a rank's work with few and with more layers, and how many the model has."""

    few: Trace
    more: Trace | None
    layers: int
    hop_bytes: float
    dtype: str


class Planner:
    """Predicts recipes of one training; what was captured once serves all recipes with the same work per rank."""

    def __init__(self, training: Training, *, fused_optimizer: bool = True) -> None:
        self._training, self._fused = training, fused_optimizer
        self._known: dict[Recipe, Captured] = {}

    def captured(self, recipe: Recipe) -> Captured:
        """Traces of a recipe; pipeline stages and micro-batches do not matter to them."""
        key = replace(recipe, pp=1, chunks=1, accumulate=1)
        if key not in self._known:
            few = self._step(key, FEW)
            large = few.layers > MORE
            first = lower(few, fused_optimizer=self._fused)
            second = lower(self._step(key, MORE), fused_optimizer=self._fused) if large else None
            if not large and few.layers > few.layers_captured:
                first = lower(self._step(key, few.layers), fused_optimizer=self._fused)
            self._known[key] = Captured(first, second, few.layers, hop_bytes(first), main_dtype(first))
        return self._known[key]

    def _step(self, recipe: Recipe, layers: int) -> StepGraph:
        step = capture(self._training, recipe, layers=layers or None)
        with world_of(step):
            step = regathered(step)
        if self._training.optimizer is not None:
            step.optimizer = capture_optimizer(self._training, step)
        return step

    def predict(self, recipe: Recipe, chip: Chip) -> Prediction:
        """Predict one recipe.

        Raises:
            CannotCapture: the step cannot become one graph.
            ConfigError: the recipe does not fit the model.
        """
        found = self.captured(recipe)
        return predict(
            pieces_of(found, recipe, chip, synced=False),
            pieces_of(found, recipe, chip, synced=True),
            recipe,
            chip,
            found.hop_bytes,
            found.dtype,
        )


def pieces_of(found: Captured, recipe: Recipe, chip: Chip, *, synced: bool) -> Pieces:
    few = found.few if synced else found.few.without("dp")
    more = None if found.more is None else found.more if synced else found.more.without("dp")
    large = None if more is None else estimate(more, recipe, chip)
    return pieces(estimate(few, recipe, chip), large, (FEW, MORE, found.layers))


def hop_bytes(trace: Trace) -> float:
    """What a layer hands to the next: the smallest activation that a matrix product of a layer leaves."""
    outputs = [op.allocates for op in trace.ops if op.kind == "matmul" and op.phase == "forward" and op.allocates]
    return min(outputs, default=0.0)


def main_dtype(trace: Trace) -> str:
    """The dtype of most of the floating-point operations."""
    by_dtype: dict[str, float] = {}
    for op in trace.ops:
        by_dtype[op.dtype] = by_dtype.get(op.dtype, 0.0) + op.flops
    return max(by_dtype, key=lambda each: by_dtype[each], default="fp32")


def recipes(chips: int, rows: int, *, layers: int, host: int, dtype: str = "bf16") -> Iterator[Recipe]:
    """Recipes that use all chips and split `rows` rows evenly: powers of two, tensor parallelism within a host."""
    for tp in powers(min(chips, host)):
        for pp in powers(min(chips // tp, max(layers, 1))):
            data = chips // (tp * pp)
            if tp * pp * data != chips or rows % data:
                continue
            for micro in powers(min(rows // data, 8)):
                accumulate, left = divmod(rows // data, micro)
                if left or (pp > 1 and accumulate < pp):
                    continue
                for recompute in ("none", "full"):
                    yield Recipe(
                        fsdp=data, tp=tp, pp=pp, micro=micro, accumulate=accumulate, recompute=recompute, dtype=dtype
                    )


def powers(limit: int) -> list[int]:
    return [2**n for n in range(int(math.log2(limit)) + 1)] if limit >= 1 else []


def plan(
    planner: Planner, chips: int, chip: Chip, rows: int, candidates: list[Recipe] | None = None
) -> tuple[list[Prediction], list[Refused]]:
    """Predict all candidates, fastest first; those that do not fit into memory, or fail, are refused with the reason.

    Raises:
        CannotCapture: no recipe at all can be captured, for the same reason.
        ConfigError: no recipe splits the rows over the chips.
    """
    host = next((link.ranks for link in chip.links if link.ranks), 1)
    layers = planner.captured(Recipe()).layers
    found = candidates or list(recipes(chips, rows, layers=layers, host=host))
    if not found:
        raise ConfigError(f"no recipe splits {rows} rows over {chips} chips", hint="--rows: a multiple of the chips")
    good: list[Prediction] = []
    refused: list[Refused] = []
    for recipe in found:
        try:
            each = planner.predict(recipe, chip)
        except (CannotCapture, ConfigError) as error:
            refused.append(Refused(recipe, first_line(error)))
            continue
        if each.fits:
            good.append(each)
        else:
            needed = f"{each.memory_bytes / 1e9:.1f} GB of {chip.memory_bytes / 1e9:.0f}"
            refused.append(Refused(recipe, f"out of memory: {needed}"))
    return sorted(good, key=lambda each: each.step_s), refused


def first_line(error: ArgosyError) -> str:
    return str(error).splitlines()[0]
