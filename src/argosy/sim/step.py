"""One step of all ranks on virtual time: ranks that behave alike are simulated once."""

from dataclasses import dataclass
from typing import Any, cast

from argosy.core import ConfigError
from argosy.cost import (
    Chip,
    Recipe,
    Task,
    Timeline,
    Trace,
    fold,
    gradient_tail,
    memory_profile,
    simulate,
    tasks_of,
)

DIMS = ("tp", "fsdp", "dp", "pp")
"""Innermost first."""


@dataclass(frozen=True, slots=True)
class StepWorld:
    """The classes of ranks of a step and what they did when."""

    tasks: list[Task]
    timeline: Timeline
    classes: dict[int, list[int]]
    """Class → its ranks."""

    @property
    def step_s(self) -> float:
        return self.timeline.end


def slow_ranks(texts: tuple[str, ...], world: int) -> dict[int, float]:
    """Read `77:1.1`: rank 77 computes 1.1 times as long.

    Raises:
        ConfigError: not such a text, or no such rank.
    """
    found: dict[int, float] = {}
    for text in texts:
        rank, _, factor = text.partition(":")
        try:
            found[int(rank)] = float(factor)
        except ValueError as error:
            raise ConfigError(f"not RANK:FACTOR: {text}", hint="--slow 77:1.1") from error
        if not 0 <= int(rank) < world or found[int(rank)] <= 0:
            raise ConfigError(f"no such rank, or no positive factor: {text}", hint=f"ranks are 0 to {world - 1}")
    return found


def groups_of(recipe: Recipe) -> dict[str, list[list[int]]]:
    """Dimension → the ranks of each of its groups. Pipeline stages are not simulated here: they are all alike."""
    found: dict[str, list[list[int]]] = {}
    stride = 1
    for dim in DIMS[:3]:
        size = int(getattr(recipe, dim))
        if size > 1:
            starts = [r for r in range(recipe.world) if (r // stride) % size == 0]
            found[dim] = [[start + stride * index for index in range(size)] for start in starts]
        stride *= size
    return found


def sim_step(
    trace: Trace, recipe: Recipe, chip: Chip, slow: dict[int, float] | None = None, *, folded: bool = True
) -> StepWorld:
    """Simulate one micro-batch of all ranks; a collective ends on its ranks at the same time.

    Raises:
        ConfigError: the recipe has pipeline stages.
    """
    if recipe.pp > 1:
        raise ConfigError(f"one step of a pipeline is not simulated rank by rank: pp={recipe.pp}")
    slow = slow or {}
    groups = groups_of(recipe)
    signatures = [slow.get(rank, 1.0) for rank in range(recipe.world)]
    flat = [ranks for dim in groups.values() for ranks in dim]
    colours = fold(signatures, flat) if folded else list(range(recipe.world))
    classes: dict[int, list[int]] = {}
    for rank, colour in enumerate(colours):
        classes.setdefault(colour, []).append(rank)
    programs = {colour: tasks_of(trace, recipe, chip, signatures[ranks[0]]) for colour, ranks in classes.items()}
    tasks = join(trace, recipe, chip, programs, class_groups(groups, colours))
    return StepWorld(tasks, simulate(tasks), classes)


def class_groups(groups: dict[str, list[list[int]]], colours: list[int]) -> dict[str, list[list[int]]]:
    """Dimension → the sets of classes that meet in one of its collectives, each set once."""
    return {
        dim: [list(each) for each in dict.fromkeys(tuple(dict.fromkeys(colours[r] for r in ranks)) for ranks in found)]
        for dim, found in groups.items()
    }


def join(
    trace: Trace, recipe: Recipe, chip: Chip, programs: dict[int, list[Task]], meets: dict[str, list[list[int]]]
) -> list[Task]:
    """Interleave the programs of all classes; a collective is one task on the queues of all classes that meet."""
    dims = collective_dims(trace, recipe, chip)
    merged: list[Task] = []
    place: dict[tuple[int, int], int] = {}
    length = len(next(iter(programs.values())))
    for position in range(length):
        dim = dims.get(position)
        sets = meets[dim] if dim in meets else [[colour] for colour in programs]
        for together in united(sets):
            first = programs[together[0]][position]
            needs = {place[colour, need] for colour in together for need in programs[colour][position].needs}
            queues = tuple((colour, first.queues[0]) for colour in together)
            seconds = max(programs[colour][position].seconds for colour in together)
            for colour in together:
                place[colour, position] = len(merged)
            merged.append(Task(first.name, seconds, queues, tuple(needs)))
    return merged


def united(sets: list[list[int]]) -> list[list[int]]:
    """Join sets that share a class: all ranks of a class do the same, so those sets end at the same time."""
    joined: list[set[int]] = []
    for each in sets:
        touching = [s for s in joined if s & set(each)]
        joined = [s for s in joined if not s & set(each)] + [set(each).union(*touching)]
    return [sorted(s) for s in joined]


def collective_dims(trace: Trace, recipe: Recipe, chip: Chip) -> dict[int, str]:
    """Position in the program → dimension, for the collectives. Positions are those of `tasks_of`."""
    found: dict[int, str] = {}
    for position, index in enumerate(program_order(trace, chip)):
        collective = trace.ops[index].collective
        if collective is not None and getattr(recipe, collective.dim) > 1:
            found[position] = collective.dim
    return found


def program_order(trace: Trace, chip: Chip) -> list[int]:
    """The operations in the order of `tasks_of`: with overlap, what only finishes gradients comes last."""
    tail = gradient_tail(trace) if chip.overlap else set[int]()
    return [i for i in range(len(trace.ops)) if i not in tail] + sorted(tail)


def memory_counters(trace: Trace, world: StepWorld, chip: Chip) -> list[dict[str, Any]]:
    """Live bytes of rank 0 by class over time, as counters for Perfetto."""
    held = memory_profile(trace).over_time
    queues = rank_queue(world, 0)
    starts = [s for task, s in zip(world.tasks, world.timeline.starts, strict=True) if queues & set(task.queues)]
    order = program_order(trace, chip)
    begun = dict(zip(order, starts, strict=True))
    names = sorted({name for each in held for name in each})
    return [
        {"ph": "C", "name": "bytes", "pid": 0, "ts": begun[i] * 1e6, "args": {n: held[i].get(n, 0.0) for n in names}}
        for i in sorted(begun, key=lambda i: begun[i])
    ]


def rank_queue(world: StepWorld, rank: int) -> set[Any]:
    """The queues of the class of this rank."""
    colour = next(each for each, ranks in world.classes.items() if rank in ranks)
    return {queue for task in world.tasks for queue in task.queues if cast(tuple[int, str], queue)[0] == colour}


def rank_tasks(world: StepWorld, rank: int) -> list[Task]:
    """What one rank took part in, in program order."""
    queues = rank_queue(world, rank)
    return [task for task in world.tasks if queues & set(task.queues)]


def perfetto(world: StepWorld) -> dict[str, Any]:
    """The step as a trace that Perfetto and Chrome open; a class of ranks is shown as its first rank."""
    events: list[dict[str, Any]] = []
    for task, start, end in zip(world.tasks, world.timeline.starts, world.timeline.ends, strict=True):
        for queue in task.queues if end > start else ():
            colour, name = cast(tuple[int, str], queue)
            when = {"ts": start * 1e6, "dur": (end - start) * 1e6}
            events.append({"ph": "X", "name": task.name, "pid": world.classes[colour][0], "tid": name, **when})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
