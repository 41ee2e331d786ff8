"""One step of a pipeline on virtual time: the ranks of each stage are simulated, then the schedule of the stages.

A straggler slows its own stage, and the stages wait for it as the schedule says.
"""

from dataclasses import dataclass, replace

from argosy.core import ConfigError
from argosy.cost import Chip, Recipe, Trace, hop_time, pipeline_time
from argosy.sim.step import sim_step


@dataclass(frozen=True, slots=True)
class PipelineWorld:
    """A step of all stages; `forward` and `backward` are those of one micro-batch, by stage."""

    step_s: float
    forward: list[float]
    backward: list[float]
    classes: int
    """Classes of ranks over all stages; equal stages count once."""


def only_phase(trace: Trace, phase: str) -> Trace:
    """The operations of one phase; what other phases made is there already."""
    kept = [index for index, op in enumerate(trace.ops) if op.phase == phase]
    place = {old: new for new, old in enumerate(kept)}
    ops = [
        replace(trace.ops[index], needs=tuple(place[need] for need in trace.ops[index].needs if need in place))
        for index in kept
    ]
    return Trace(tuple(ops), trace.resident, trace.layers)


def sim_pipeline(
    trace: Trace, recipe: Recipe, chip: Chip, slow: dict[int, float] | None = None, hop_bytes: float = 0.0
) -> PipelineWorld:
    """Simulate all micro-batches of all stages; `trace` is what one stage computes for one micro-batch.

    Raises:
        ConfigError: the recipe has no pipeline.
    """
    if recipe.pp == 1:
        raise ConfigError("a recipe without pipeline stages: use sim_step")
    inner = replace(recipe, pp=1, chunks=1, accumulate=1)
    phases = only_phase(trace, "forward"), only_phase(trace, "backward")
    known: dict[tuple[tuple[int, float], ...], tuple[float, float, int]] = {}
    stages: list[tuple[float, float, int]] = []
    for stage in range(recipe.pp):
        first = stage * inner.world
        here = {rank - first: factor for rank, factor in (slow or {}).items() if 0 <= rank - first < inner.world}
        key = tuple(sorted(here.items()))
        if key not in known:
            worlds = [sim_step(phase, inner, chip, here) for phase in phases]
            known[key] = worlds[0].step_s, worlds[1].step_s, len(worlds[0].classes)
        stages.append(known[key])
    forward, backward = [each[0] for each in stages], [each[1] for each in stages]
    hop_s = hop_time(hop_bytes / recipe.tp, recipe, chip) if hop_bytes else 0.0
    step_s = pipeline_time(forward, backward, recipe.accumulate, hop_s, recipe.chunks)
    return PipelineWorld(step_s, forward, backward, sum(each[2] for each in known.values()))
