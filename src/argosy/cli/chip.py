"""`argosy chip`: describe the devices that predictions are made for."""

from pathlib import Path

import click

from argosy.cli.tables import print_json, print_table


@click.group(short_help="Measure this machine, and list the devices that predictions know.")
def command() -> None:
    """Describe devices for `argosy plan` and `argosy sim`."""


@command.command()
@click.argument("path", type=click.Path(path_type=Path), default="chip.toml")
@click.option(
    "--ranks", type=click.IntRange(1, 16), default=2, show_default=True, help="Ranks that will share this machine."
)
@click.option("--budget-s", type=float, default=100.0, show_default=True, help="Stop adding sizes after this time.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def measure(path: Path, ranks: int, budget_s: float, as_json: bool) -> None:
    """Measure this machine's CPUs, caches, memory and loopback into PATH, a chip file."""
    from argosy.cost import load_chip
    from argosy.graph import chip_toml
    from argosy.graph import measure as measure_machine

    found = measure_machine(ranks=ranks, budget_s=budget_s)
    path.write_text(chip_toml(found, path.stem))
    chip = load_chip(str(path.resolve()))
    if as_json:
        print_json({"path": str(path), "measured": found})
        return
    rows = [
        [kind, f"{work:.3g}", f"{seconds * 1e6:.4g}", f"{work / seconds:.3g}"]
        for kind, curve in (("matmul", found.matmul), ("memory", found.memory), *found.links.items())
        for work, seconds in curve
    ]
    print_table(["MEASURED", "WORK", "US", "PER SECOND"], rows, right=[1, 2, 3])
    levels = [[name, f"{bytes_ / 1e6:,.3g} MB", f"{rate / 1e9:.3g} GB/s"] for name, bytes_, rate in found.levels]
    print_table(["LEVEL", "SIZE", "RATE"], levels, right=[1, 2])
    print(f"one of {found.ranks} ranks at once, with {found.threads} threads each")
    print(f"{path}: {chip.peak('fp32'):.3g} operations/s, {chip.memory_bandwidth:.3g} bytes/s from memory")


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def list_(as_json: bool) -> None:
    """List the chips that come with Argosy, and where their figures come from."""
    from argosy.cost import load_chip, shipped

    chips = [(name, load_chip(name)) for name in shipped()]
    if as_json:
        print_json({"chips": [chip for _, chip in chips]})
        return
    rows = [
        [name, f"{max(chip.flops.values()):.3g}", f"{chip.memory_bytes / 1e9:.0f} GB", chip.source("flops")]
        for name, chip in chips
    ]
    print_table(["CHIP", "PEAK", "MEMORY", "SOURCE"], rows, right=[1, 2])
