"""Predict a training step: time with an interval, memory, utilisation, and how much of it is guessed.

An estimate is a flat table of numbers of one micro-batch on one rank, so that those of a model with more layers follow
from two captures of few layers by extending the line. Pure.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from argosy.core import ConfigError
from argosy.cost.chip import Chip
from argosy.cost.engine import Task, Timeline, simulate
from argosy.cost.pipeline import pipeline_time
from argosy.cost.price import SPREAD, Price, hop_time, price_collective, price_op
from argosy.cost.recipe import Recipe
from argosy.cost.trace import GRADIENT, Op, Trace, memory_profile

Estimate = dict[str, float]
INTERVAL = 1.28
"""Standard deviations either side that hold 80% of a normal distribution."""
NO_GPU = "nothing here was measured on a GPU: figures of GPUs are predictions from published peaks"


@dataclass(frozen=True, slots=True)
class Pieces:
    """What one more layer adds, and what is there without any."""

    rest: Estimate
    layer: Estimate
    layers: int

    def stage(self, layers: float, *, rest: bool) -> Estimate:
        keys = self.rest.keys() | self.layer.keys()
        return {k: self.layer.get(k, 0.0) * layers + (self.rest.get(k, 0.0) if rest else 0.0) for k in keys}


@dataclass(frozen=True, slots=True)
class Prediction:
    """A step of a recipe on a chip."""

    recipe: Recipe
    chip: str
    step_s: float
    low_s: float
    high_s: float
    mfu: float
    memory_bytes: float
    fits: bool
    parts: dict[str, float]
    """Seconds by kind of work; `bubble`, `exposed` communication and `optimizer` among them."""
    tiers: dict[str, float]
    """The share of the time that each tier of prices stands for."""
    memory: dict[str, float]
    note: str = NO_GPU


def price(op: Op, recipe: Recipe, chip: Chip) -> Price:
    return price_op(op, chip) if op.collective is None else price_collective(op.collective, recipe, chip)


def tasks_of(trace: Trace, recipe: Recipe, chip: Chip, slow: float = 1.0) -> list[Task]:
    """The step as tasks. With overlap, gathers start one gather early, and gradients are waited for at the end."""
    tail = gradient_tail(trace) if chip.overlap else set[int]()
    order = [i for i in range(len(trace.ops)) if i not in tail] + sorted(tail)
    place = {old: new for new, old in enumerate(order)}
    tasks: list[Task] = []
    computed, gather_at = -1, -1
    for old in order:
        op = trace.ops[old]
        seconds = price(op, recipe, chip).seconds
        if op.collective is None or not chip.overlap:
            queue, needs = "compute", tuple(place[i] for i in op.needs)
            seconds *= slow if op.collective is None else 1.0
        else:
            queue = f"{op.collective.dim} links"
            needs = tuple(place[i] for i in op.needs)
            if op.collective.kind == "all_gather" and op.collective.dim == "fsdp":
                needs, gather_at = ((gather_at,) if gather_at >= 0 else ()), computed
        tasks.append(Task(op.name, seconds, (queue,), needs))
        if queue == "compute":
            computed = len(tasks) - 1
    return tasks


def gradient_tail(trace: Trace) -> set[int]:
    """Operations that only finish gradients: they follow a sum over data-parallel ranks and nothing waits for them."""
    tail: set[int] = set()
    for index, op in enumerate(trace.ops):
        summed = any(is_gradient_sum(trace.ops[i]) or i in tail for i in op.needs)
        if summed and op.phase == "backward" and op.collective is None:
            tail.add(index)
    for index in reversed(range(len(trace.ops))):
        if index not in tail:
            tail -= set(trace.ops[index].needs)
    return tail


def is_gradient_sum(op: Op) -> bool:
    return op.collective is not None and op.collective.dim in ("dp", "fsdp") and op.collective.kind in GRADIENT


def estimate(trace: Trace, recipe: Recipe, chip: Chip, slow: float = 1.0) -> Estimate:
    """The numbers of one micro-batch on one rank; the update of the optimizer is apart."""
    step = Trace(tuple(op for op in trace.ops if op.phase != "optimizer"), trace.resident, trace.layers)
    tasks = tasks_of(step, recipe, chip, slow)
    found = times(step, tasks, simulate(tasks), chip)
    update = [(op, price(op, recipe, chip)) for op in trace.ops if op.phase == "optimizer"]
    found["optimizer"] = sum(each.seconds for _, each in update) * slow
    for op, each in [*((op, price(op, recipe, chip)) for op in step.ops), *update]:
        kind = "optimizer" if op.phase == "optimizer" else op.kind
        key = f"part:{kind}:{each.tier}"
        found[key] = found.get(key, 0.0) + each.seconds * (slow if op.collective is None else 1.0)
    profile = memory_profile(step)
    found |= {f"resident:{name}": value for name, value in profile.resident.items()}
    found |= {"between": profile.between, "extra": profile.peak - sum(profile.resident.values())}
    found["gradient"] = sum(op.allocates for op in step.ops if op.holds == "gradient")
    return found


def times(step: Trace, tasks: list[Task], line: Timeline, chip: Chip) -> Estimate:
    pairs = zip(step.ops, line.ends, strict=False)
    first = max((end for op, end in pairs if op.phase == "forward" and op.collective is None), default=0.0)
    busy = sum(task.seconds for task in tasks if task.queues == ("compute",))
    return {
        "forward": first,
        "backward": line.end - first,
        "exposed": line.end - busy if chip.overlap else 0.0,
        "flops": step.flops,
        "flops_forward": step.total(lambda op: op.flops, "forward"),
    }


def pieces(small: Estimate, large: Estimate | None, layers: tuple[int, int, int]) -> Pieces:
    """Split two estimates of a model into a layer and the rest; `layers` are those of small, large and the model."""
    if large is None:
        return Pieces(small, {}, 0)
    count, more, total = layers
    layer = {k: (large.get(k, 0.0) - small.get(k, 0.0)) / (more - count) for k in small.keys() | large.keys()}
    rest = {k: max(0.0, small.get(k, 0.0) - count * layer[k]) for k in layer}
    return Pieces(rest, {k: max(0.0, v) for k, v in layer.items()}, total)


def predict(model: Pieces, synced: Pieces, recipe: Recipe, chip: Chip, hop_bytes: float, dtype: str) -> Prediction:
    """Put micro-batches, pipeline stages and the optimizer together.

    `model` is without the sum over `dp`, which only the last micro-batch pays; `synced` is with it.

    Raises:
        ConfigError: the layers cannot be split over the stages.
    """
    stages = recipe.pp
    if stages > 1 and (model.layers == 0 or model.layers % (stages * recipe.chunks)):
        raise ConfigError(f"pp={stages} chunks={recipe.chunks} does not divide the layers: {model.layers}")
    each = [model.stage(model.layers / stages, rest=index == stages - 1) for index in range(stages)]
    last = each[-1]
    hop = hop_time(hop_bytes / recipe.tp, recipe, chip) if stages > 1 else 0.0
    flow = pipeline_time(
        [e["forward"] for e in each], [e["backward"] for e in each], recipe.accumulate, hop, recipe.chunks
    )
    full = synced.stage(model.layers / stages, rest=True)
    sync = max(0.0, full["forward"] + full["backward"] - last["forward"] - last["backward"])
    update = last["optimizer"]
    step_s = flow + sync + update
    ideal = recipe.accumulate * (last["forward"] + last["backward"])
    parts, tiers, deviation = shares(last, recipe.accumulate)
    parts |= {"optimizer": update, "bubble": max(0.0, flow - ideal), "gradient sum": sync}
    parts["exposed"] = last["exposed"] * recipe.accumulate
    deviation = math.hypot(deviation, SPREAD["roofline"] * (sync + parts["exposed"]))
    deviation *= step_s / max(ideal, 1e-12) if ideal else 1.0
    memory = memory_of(last, recipe)
    total = sum(memory.values())
    model_flops = 3 * sum(e["flops_forward"] for e in each) / stages * recipe.accumulate
    return Prediction(
        recipe=recipe,
        chip=chip.name,
        step_s=step_s,
        low_s=max(step_s - INTERVAL * deviation, step_s / 4),
        high_s=step_s + INTERVAL * deviation,
        mfu=model_flops / (step_s * chip.peak(dtype)) if step_s else 0.0,
        memory_bytes=total,
        fits=total <= chip.memory_bytes,
        parts={name: value for name, value in parts.items() if value > 0},
        tiers=tiers,
        memory=memory,
    )


def shares(stage: Mapping[str, float], micros: int) -> tuple[dict[str, float], dict[str, float], float]:
    """Seconds by kind, share of time by tier, and the standard deviation of their sum; a kind errs as a whole."""
    parts: dict[str, float] = {}
    tiers: dict[str, float] = {}
    squares = 0.0
    for key, value in stage.items():
        if not key.startswith("part:"):
            continue
        _, kind, tier = key.split(":")
        seconds = value * (1 if kind == "optimizer" else micros)
        if kind != "optimizer":
            parts[kind] = parts.get(kind, 0.0) + seconds
        tiers[tier] = tiers.get(tier, 0.0) + seconds
        squares += (seconds * SPREAD[tier]) ** 2
    whole = sum(tiers.values()) or 1.0
    return parts, {tier: value / whole for tier, value in tiers.items()}, math.sqrt(squares)


def memory_of(stage: Mapping[str, float], recipe: Recipe) -> dict[str, float]:
    """Bytes of the fullest stage by class."""
    found = {key.removeprefix("resident:"): value for key, value in stage.items() if key.startswith("resident:")}
    kept = min(recipe.pp, recipe.accumulate) - 1
    if kept:
        found["activations of other micro-batches"] = stage["between"] * kept
    if recipe.accumulate > 1:
        found["accumulated gradients"] = stage["gradient"]
    found["step"] = stage["extra"]
    return {name: value for name, value in found.items() if value > 0}
