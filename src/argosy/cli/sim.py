"""`argosy sim`: one recipe in depth, with what-if flags."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from argosy.cli.sim_control import command as control
from argosy.cli.tables import print_json, print_table
from argosy.core import ConfigError

if TYPE_CHECKING:
    from argosy.cost import Chip, Recipe
    from argosy.sim import PipelineWorld


@click.group(short_help="Simulate a training step, the goodput of a long run, or thousands of hosts.")
def command() -> None:
    """Simulate a training step on given chips, the goodput of a long run, or a run on thousands of hosts."""


command.add_command(control)


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
    from argosy.sim import memory_counters, perfetto, rank_tasks, sim_pipeline, sim_step, slow_ranks

    recipe, chip = Recipe.parse(text), load_chip(name).scaled(link=factor(link_bw))
    captured = capture(load_training(target), recipe, layers=layers)
    trace = lower(captured)
    if recipe.pp > 1:
        print_pipeline(sim_pipeline(trace, recipe, chip, slow_ranks(slow, recipe.world)), recipe, chip, as_json=as_json)
        return
    world = sim_step(trace, recipe, chip, slow_ranks(slow, recipe.world))
    if trace_path:
        drawn = perfetto(world)
        drawn["traceEvents"] += memory_counters(trace, world, chip)
        trace_path.write_text(json.dumps(drawn))
    if chakra_path:
        chakra_path.write_bytes(chakra_bytes(trace, recipe))
    memory = memory_profile(trace)
    by_kind: dict[str, float] = {}
    for task in rank_tasks(world, 0):
        by_kind[task.name] = by_kind.get(task.name, 0.0) + task.seconds
    longest = sorted(by_kind.items(), key=lambda each: -each[1])[:10]
    if as_json:
        found = {"recipe": str(recipe), "chip": chip.name, "layers": captured.layers_captured, "seconds": world.step_s}
        found |= {
            "classes": len(world.classes),
            "operations": dict(longest),
            "memory": replace(memory, over_time=()),
            "note": NO_GPU,
        }
        print_json(found)
        return
    of = f"{captured.layers_captured} of {captured.layers} layers" if captured.layers else "the whole model"
    print(f"{recipe} on {chip.name}: {world.step_s * 1e3:.3f} ms for one micro-batch of {of}")
    print(f"{recipe.world} ranks fold to {len(world.classes)}; peak {memory.peak / 1e9:.2f} GB at {memory.peak_op}")
    print_table(["OPERATION", "MS"], [[n, f"{s * 1e3:.3f}"] for n, s in longest], right=[1])
    print(f"note: {NO_GPU}")


def print_pipeline(world: "PipelineWorld", recipe: "Recipe", chip: "Chip", *, as_json: bool) -> None:
    """Print the step of a pipeline, whose stages each have the captured layers."""
    from argosy.cost import NO_GPU

    if as_json:
        print_json({"recipe": str(recipe), "chip": chip.name, "pipeline": world, "note": NO_GPU})
        return
    print(f"{recipe} on {chip.name}: {world.step_s * 1e3:.3f} ms, where each stage has the captured layers")
    print(f"{recipe.world} ranks fold to {world.classes}")
    rows = [
        [str(stage), f"{forward * 1e3:.3f}", f"{backward * 1e3:.3f}"]
        for stage, (forward, backward) in enumerate(zip(world.forward, world.backward, strict=True))
    ]
    print_table(["STAGE", "FORWARD MS", "BACKWARD MS"], rows, right=[1, 2])
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


@command.command()
@click.option("--hosts", type=int, required=True, help="Hosts that train at once.")
@click.option("--step-s", type=float, required=True, help="Seconds of a step, as `argosy plan` predicts it.")
@click.option("--spares", type=int, help="Spare hosts. Default: as few as cost 0.1% of goodput.")
@click.option("--days", type=float, default=30.0, show_default=True)
@click.option("--mtbf-days", type=float, default=365.0, show_default=True, help="Between failures of one host.")
@click.option("--save-s", type=float, default=10.0, show_default=True, help="Training time that a checkpoint costs.")
@click.option("--detect-s", type=float, default=2.0, show_default=True)
@click.option("--restart-s", type=float, default=60.0, show_default=True)
@click.option("--repair-hours", type=float, default=4.0, show_default=True)
@click.option("--restart", "policy", default="rank", show_default=True, help="As in `argosy run --restart`.")
@click.option("--heals", is_flag=True, help="A replaced rank takes its state from the others.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def goodput(
    hosts: int,
    step_s: float,
    spares: int | None,
    days: float,
    mtbf_days: float,
    save_s: float,
    detect_s: float,
    restart_s: float,
    repair_hours: float,
    policy: str,
    heals: bool,
    as_json: bool,
) -> None:
    """Simulate failures of a long run through the decisions that ship: goodput, checkpoint interval, spares."""
    from argosy.control import parse_restart
    from argosy.sim import Fleet, choose_every, choose_spares, sample_goodput

    fleet = Fleet(
        hosts=hosts,
        step_s=step_s,
        days=days,
        mtbf_host_days=mtbf_days,
        save_s=save_s,
        detect_s=detect_s,
        restart_s=restart_s,
        repair_s=repair_hours * 3600,
        heals=heals,
        restart=parse_restart(policy, None),
    )
    spares = choose_spares(fleet) if spares is None else spares
    fleet = replace(fleet, spares=spares)
    found = sample_goodput(fleet)
    every, _ = choose_every(fleet)
    if as_json:
        print_json({"goodput": found, "best_interval_steps": every, "spares": spares})
        return
    each = found.typical
    print(f"goodput {found.median:.1%} (80% of runs: {found.low:.1%} to {found.high:.1%}), {spares} spare hosts")
    print(f"{each.failures} failures, {each.restarts} restarts, {each.gave_up} times a person started the run again")
    chosen = f"{each.interval_steps:,} steps" if each.failures else "not yet"
    print(f"checkpoints: best every {every:,} steps ({every * step_s:,.0f} s); what ships chose {chosen}")
    rows = [[cause, f"{share:.2%}"] for cause, share in sorted(each.lost.items(), key=lambda e: -e[1]) if share > 0]
    print_table(["LOST TO", "SHARE"], rows, right=[1])
    print("note: failure rates and costs are the ones given; hosts fail independently of each other")
