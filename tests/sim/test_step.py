"""A folded world takes as long as the whole one, and a straggler slows what it touches."""

import random

import pytest

from argosy.core import ConfigError
from argosy.cost import Collective, Op, Recipe, Trace, load_chip
from argosy.sim import memory_counters, perfetto, sim_step, slow_ranks


def random_trace(random_: random.Random) -> Trace:
    ops: list[Op] = []
    for index in range(14):
        needs = (random_.randrange(index),) if index else ()
        phase = "forward" if index < 6 else "backward"
        if random_.random() < 0.4:
            kind = random_.choice(["all_gather", "reduce_scatter", "all_reduce"])
            what = Collective(kind, random_.choice(["fsdp", "tp", "dp"]), random_.uniform(1e6, 1e9))
            ops.append(Op(kind, "collective", phase, needs=needs, collective=what))
        else:
            ops.append(Op("mm", "matmul", phase, flops=random_.uniform(1e9, 1e13), dtype="bf16", needs=needs))
    return Trace(tuple(ops), {})


def test_folded_equals_unfolded():
    chip = load_chip("h100")
    folded_any = 0
    for seed in range(300):
        random_ = random.Random(seed)
        trace = random_trace(random_)
        recipe = Recipe(tp=random_.choice([1, 2, 4]), fsdp=random_.choice([1, 2, 4]), dp=random_.choice([1, 2, 3]))
        slow = {random_.randrange(recipe.world): random_.uniform(1, 2) for _ in range(random_.randrange(3))}
        whole, folded = (sim_step(trace, recipe, chip, slow, folded=each) for each in (False, True))
        assert folded.step_s == pytest.approx(whole.step_s, rel=1e-12), seed
        folded_any += len(folded.classes) < recipe.world
    assert folded_any > 150


def test_many_ranks_fold_to_few():
    trace = random_trace(random.Random(1))
    recipe = Recipe(tp=8, fsdp=128)
    assert len(sim_step(trace, recipe, load_chip("h100")).classes) == 1
    slowed = sim_step(trace, recipe, load_chip("h100"), {77: 1.5})
    assert 1 < len(slowed.classes) <= 8
    assert slowed.step_s > sim_step(trace, recipe, load_chip("h100")).step_s


def test_the_trace_names_ranks_and_queues():
    world = sim_step(random_trace(random.Random(2)), Recipe(fsdp=2), load_chip("a100"))
    events = perfetto(world)["traceEvents"]
    assert events
    assert all(each["pid"] == 0 and each["dur"] > 0 for each in events)


def test_the_trace_shows_memory_by_class_over_time():
    ops = (
        Op("a", "memory", "forward", bytes=1e9, allocates=10, holds="activation"),
        Op("b", "memory", "backward", bytes=1e9, allocates=5, frees=10, holds="gradient", needs=(0,)),
        Op("c", "memory", "backward", bytes=1e9, needs=(1,)),
    )
    chip, trace = load_chip("h100"), Trace(ops, {})
    counters = memory_counters(trace, sim_step(trace, Recipe(), chip), chip)
    assert [each["args"]["activation"] for each in counters] == [10, 10, 0]
    assert [each["args"]["gradient"] for each in counters] == [0, 5, 5]
    assert [each["ts"] for each in counters] == sorted(each["ts"] for each in counters)


@pytest.mark.parametrize("text", ["3", "x:1", "9:1.1", "1:0", "-1:2"])
def test_bad_stragglers_are_refused(text: str):
    with pytest.raises(ConfigError):
        slow_ranks((text,), 8)


def test_a_pipeline_is_refused_here():
    with pytest.raises(ConfigError, match="pp=2"):
        sim_step(random_trace(random.Random(0)), Recipe(pp=2), load_chip("h100"))
