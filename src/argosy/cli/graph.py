"""`argosy graph`: what each pass did to a captured step, and which one changed the loss."""

import sys

import click

from argosy.cli.tables import print_json, print_table


@click.group(short_help="Show what passes did to a training step, and find the one that changed the loss.")
def command() -> None:
    """Show what passes did to a captured training step, with proof, and find the one that changed the loss."""


_recipe = click.option("--recipe", "text", default="", help="As in 'fsdp=4 tp=2'.")
_chip = click.option("--chip", "name", default="h100", show_default=True, help="A shipped chip, or a .toml file.")
_pass = click.option(
    "--pass", "names", multiple=True, help="Only this pass, or FILE:NAME for one of yours. Repeatable."
)
_layers = click.option(
    "--layers", type=int, default=2, show_default=True, help="How many of the equal layers to capture."
)


@command.command()
@click.argument("target")
@_recipe
@_chip
@_pass
@_layers
@click.option("--diff", "as_diff", is_flag=True, help="Print the changed lines of each graph.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def show(target: str, text: str, name: str, names: tuple[str, ...], layers: int, as_diff: bool, as_json: bool) -> None:
    """Apply the passes to TARGET, a script FILE[:NAME] that defines `training`, and print their certificates."""
    from argosy.cost import NO_GPU, Recipe, load_chip
    from argosy.graph import Certificate, apply_passes, capture, graph_diff, load_training, select_passes

    step = capture(load_training(target), Recipe.parse(text), layers=layers)
    chip, before = load_chip(name), step
    found: list[Certificate] = []
    for each, run in select_passes(names).items():
        step, certificates = apply_passes(step, {each: run}, chip)
        found += certificates
        if as_diff and certificates[0].kept:
            print(graph_diff(before, step))
        before = step
    if as_json:
        print_json({"certificates": found, "note": NO_GPU})
        return
    rows = [
        [
            each.name,
            each.verdict,
            "not run" if each.difference is None else "bitwise" if each.difference == 0 else f"{each.difference:.1g}",
            f"{each.calls[0]} → {each.calls[1]}",
            f"{each.collectives[0]} → {each.collectives[1]}",
            f"{each.seconds[0] * 1e3:.3f} → {each.seconds[1] * 1e3:.3f}",
            f"{each.peak_bytes[0] / 1e6:.1f} → {each.peak_bytes[1] / 1e6:.1f}",
            each.reason,
        ]
        for each in found
    ]
    print_table(["PASS", "VERDICT", "VALUES", "CALLS", "COLLECTIVES", "MS", "PEAK MB", "REASON"], rows)
    print(f"note: times are predicted for {chip.name}; {NO_GPU}")


@command.command()
@click.argument("target")
@_recipe
@_chip
@_pass
@_layers
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def bisect(target: str, text: str, name: str, names: tuple[str, ...], layers: int, as_json: bool) -> None:
    """Name the first pass that changes the loss or a gradient of TARGET; exits 1 if there is one."""
    from argosy.cost import Recipe, load_chip
    from argosy.graph import bisect as find
    from argosy.graph import capture, load_training, select_passes

    step = capture(load_training(target), Recipe.parse(text), layers=layers)
    guilty = find(step, select_passes(names), load_chip(name))
    if as_json:
        print_json({"pass": guilty})
    else:
        print(f"pass {guilty} changes the loss or a gradient" if guilty else "no pass changes the loss or a gradient")
    sys.exit(1 if guilty else 0)
