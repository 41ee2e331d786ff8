"""`argosy compare`: what changed between two runs, and whether one is faster."""

import re
import sys
from typing import TYPE_CHECKING

import click

from argosy.cli.tables import print_json, print_table

if TYPE_CHECKING:
    from argosy.insight import Comparison, Forecast

CHANGES_SHOWN = 20


@click.command(short_help="Compare two runs.")
@click.argument("a")
@click.argument("b", default="last")
@click.option("--fail-if-slower", metavar="PERCENT", help="Exit with 1 if B is slower than A by more than this: 3%.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def command(a: str, b: str, fail_if_slower: str | None, as_json: bool) -> None:
    """Show what changed from run A to run B: settings, code, scalars, time per step, and where the time went."""
    from argosy.insight import compare_runs, open_run

    limit = None if fail_if_slower is None else parse_percent(fail_if_slower)
    found = compare_runs(open_run(a), open_run(b))
    if as_json:
        print_json(found)
    else:
        show(found)
    if limit is not None:
        if found.time is None:
            raise click.UsageError("no steps to compare: one of the runs recorded too few")
        if found.time.slower > limit and found.time.least > 0:
            sys.exit(1)


def parse_percent(text: str) -> float:
    """`3%` or `3` as 0.03."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%?", text.strip())
    if match is None:
        raise click.UsageError(f"not a percentage: {text}")
    return float(match[1]) / 100


def show(found: "Comparison") -> None:
    """Print the comparison."""
    click.secho(f"{found.a} -> {found.b}: {headline(found)}", bold=True)
    for each in found.gone:
        print(
            f"  {each.kind.replace('_', ' ')} is gone: predicted {each.predicted:.0%} less time per step, {came(found)}"
        )
    for kind in found.new:
        print(f"  new: {kind.replace('_', ' ')}")
    if found.ledger:
        print()
        rows = [
            [name, f"{a * 1e3:.3f}", f"{b * 1e3:.3f}", f"{(b - a) * 1e3:+.3f}"]
            for name, (a, b) in sorted(found.ledger.items(), key=lambda each: -abs(each[1][1] - each[1][0]))
        ]
        print_table(["MS PER STEP", found.a, found.b, "CHANGE"], rows, right=[1, 2, 3])
    for each in found.forecasts:
        show_forecast(each)
    if found.scalars:
        print()
        scalars = [[name, f"{a:.6g}", f"{b:.6g}"] for name, (a, b) in found.scalars.items()]
        print_table(["LAST VALUE", found.a, found.b], scalars[:CHANGES_SHOWN], right=[1, 2])
    if found.changed:
        print()
        rows = [[name, a[:60], b[:60]] for name, (a, b) in found.changed.items()]
        print_table(["CHANGED", found.a, found.b], rows[:CHANGES_SHOWN])
        if len(rows) > CHANGES_SHOWN:
            print(f"{len(rows) - CHANGES_SHOWN} more changes: --json")


def show_forecast(each: "Forecast") -> None:
    """Print a prediction beside what happened."""
    print()
    inside = "inside" if each.is_inside else "outside"
    print(f"{each.run}, {each.recipe} on {each.chip}: measured {inside} the 80% interval of its prediction")
    bounds = f"{each.low * 1e3:.3f}-{each.high * 1e3:.3f}"
    rows = [["forward and backward", f"{each.step[0] * 1e3:.3f}", f"{each.step[1] * 1e3:.3f}", bounds]]
    rows += [
        [f"  {name}", f"{a * 1e3:.3f}", f"{b * 1e3:.3f}", ""]
        for name, (a, b) in sorted(each.classes.items(), key=lambda each: -each[1][1])
    ]
    print_table(["MS", "PREDICTED", "MEASURED", "INTERVAL"], rows, right=[1, 2, 3])
    print(
        f"peak beyond parameters: predicted {each.peak_bytes[0] / 1e6:.1f} MB, measured {each.peak_bytes[1] / 1e6:.1f}"
    )


def came(found: "Comparison") -> str:
    """What became of a prediction."""
    if found.time is None or found.time.is_noise:
        return "no difference measured"
    return f"measured {abs(found.time.slower):.0%} {'more' if found.time.slower > 0 else 'less'}"


def headline(found: "Comparison") -> str:
    """Which one is faster, or that nobody can tell."""
    time = found.time
    if time is None:
        return "too few steps to compare"
    before, after = f"{time.before * 1e3:.4g}", f"{time.after * 1e3:.4g} ms per step"
    bounds = f"{time.least:+.1%} to {time.most:+.1%}"
    if time.is_noise:
        return f"no difference that is more than noise ({before} -> {after}; {bounds})"
    word = "slower" if time.slower > 0 else "faster"
    return f"{abs(time.slower):.1%} {word} ({before} -> {after}; {bounds})"
