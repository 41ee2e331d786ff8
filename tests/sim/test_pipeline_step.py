"""A pipeline waits for its slowest stage, and 16,384 ranks fold to few."""

import pytest

from argosy.core import ConfigError
from argosy.cost import Collective, Op, Recipe, Trace, load_chip
from argosy.sim import sim_pipeline, sim_step

OPS = (
    Op("gather", "collective", "forward", collective=Collective("all_gather", "fsdp", 1e8)),
    Op("mm", "matmul", "forward", flops=1e13, dtype="bf16", needs=(0,)),
    Op("sum", "collective", "forward", needs=(1,), collective=Collective("all_reduce", "tp", 1e7)),
    Op("mm", "matmul", "backward", flops=2e13, dtype="bf16", needs=(2,)),
    Op("scatter", "collective", "backward", needs=(3,), collective=Collective("reduce_scatter", "fsdp", 1e8)),
)
TRACE, CHIP = Trace(OPS, {}), load_chip("h100")


def test_equal_stages_have_the_known_bubble():
    found = sim_pipeline(TRACE, Recipe(tp=2, fsdp=4, pp=4, accumulate=8), CHIP)
    one = found.forward[0] + found.backward[0]
    assert found.step_s == pytest.approx(one * (8 + 3), rel=1e-9)
    assert found.classes == 1


def test_a_straggler_slows_its_stage_alone():
    recipe = Recipe(tp=2, fsdp=4, pp=4, accumulate=8)
    found = sim_pipeline(TRACE, recipe, CHIP, {17: 1.5})
    usual = sim_pipeline(TRACE, recipe, CHIP)
    assert [a > b * 1.2 for a, b in zip(found.forward, usual.forward, strict=True)] == [False, False, True, False]
    assert found.step_s > usual.step_s * 1.2
    assert found.classes > 1


def test_many_ranks_of_many_layers_fold():
    ops = [op for layer in range(40) for op in shifted(OPS, layer * len(OPS))]
    recipe = Recipe(tp=8, fsdp=128, pp=16, accumulate=16)
    assert recipe.world == 16_384
    assert sim_pipeline(Trace(tuple(ops), {}), recipe, CHIP, {77: 1.1}).step_s > 0


def shifted(ops: tuple[Op, ...], by: int) -> list[Op]:
    return [
        Op(o.name, o.kind, o.phase, o.flops, o.bytes, o.dtype, tuple(n + by for n in o.needs), o.collective)
        for o in ops
    ]


def test_a_recipe_without_stages_is_refused():
    with pytest.raises(ConfigError, match="without pipeline"):
        sim_pipeline(TRACE, Recipe(fsdp=2), CHIP)
    assert sim_step(TRACE, Recipe(fsdp=2), CHIP).step_s > 0
