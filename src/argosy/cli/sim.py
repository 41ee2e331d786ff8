"""`argosy sim`: one recipe in depth, with what-if flags."""

import json
from pathlib import Path

import click

from argosy.cli.tables import print_json, print_table
from argosy.core import ConfigError


@click.group(short_help="Simulate a training step on given chips.")
def command() -> None:
    """Simulate a training step on given chips, without one at hand."""


@command.command()
@click.argument("target")
@click.option("--recipe", "text", default="", help="As in 'fsdp=8 tp=2 micro=2'.")
@click.option("--chip", "name", default="h100", show_default=True, help="A shipped chip, or the path of a .toml file.")
@click.option("--link-bw", default="x1", help="Faster or slower links, as in x0.5.")
@click.option("--slow", "slow", multiple=True, metavar="RANK:FACTOR", help="This rank computes FACTOR times as long.")
@click.option("--layers", type=int, default=2, show_default=True, help="How many of the equal layers to simulate.")
@click.option("--trace", "trace_path", type=click.Path(path_type=Path), help="Write a Perfetto trace there.")
@click.option("--chakra", "chakra_path", type=click.Path(path_type=Path), help="Write a Chakra trace there.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def step(
    target: str,
    text: str,
    name: str,
    link_bw: str,
    slow: tuple[str, ...],
    layers: int,
    trace_path: Path | None,
    chakra_path: Path | None,
    as_json: bool,
) -> None:
    """Simulate one micro-batch of TARGET, a script FILE[:NAME] that defines `training`."""
    from argosy.cost import NO_GPU, Recipe, load_chip, memory_profile
    from argosy.graph import capture, chakra_bytes, load_training, lower
    from argosy.sim import perfetto, rank_tasks, sim_step, slow_ranks

    recipe, chip = Recipe.parse(text), load_chip(name).scaled(link=factor(link_bw))
    captured = capture(load_training(target), recipe, layers=layers)
    trace = lower(captured)
    world = sim_step(trace, recipe, chip, slow_ranks(slow, recipe.world))
    if trace_path:
        trace_path.write_text(json.dumps(perfetto(world)))
    if chakra_path:
        chakra_path.write_bytes(chakra_bytes(trace, recipe))
    memory = memory_profile(trace)
    by_kind: dict[str, float] = {}
    for task in rank_tasks(world, 0):
        by_kind[task.name] = by_kind.get(task.name, 0.0) + task.seconds
    longest = sorted(by_kind.items(), key=lambda each: -each[1])[:10]
    if as_json:
        found = {"recipe": str(recipe), "chip": chip.name, "layers": captured.layers_captured, "seconds": world.step_s}
        found |= {"classes": len(world.classes), "operations": dict(longest), "memory": memory, "note": NO_GPU}
        print_json(found)
        return
    of = f"{captured.layers_captured} of {captured.layers} layers" if captured.layers else "the whole model"
    print(f"{recipe} on {chip.name}: {world.step_s * 1e3:.3f} ms for one micro-batch of {of}")
    print(f"{recipe.world} ranks fold to {len(world.classes)}; peak {memory.peak / 1e9:.2f} GB at {memory.peak_op}")
    print_table(["OPERATION", "MS"], [[n, f"{s * 1e3:.3f}"] for n, s in longest], right=[1])
    print(f"note: {NO_GPU}")


def factor(text: str) -> float:
    """Read `x0.5`."""
    try:
        value = float(text.removeprefix("x"))
    except ValueError as error:
        raise ConfigError(f"not a factor: {text}", hint="as in x0.5") from error
    if value <= 0:
        raise ConfigError(f"a factor must be positive: {text}")
    return value
