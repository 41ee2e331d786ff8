"""`argosy doctor`: check this machine and this installation, one line for each thing."""

import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from argosy.cli.tables import print_json

if TYPE_CHECKING:
    from argosy.process import Check

COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}
WIDTH_MAX = 110


@click.command(short_help="Check this machine and this installation.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def command(as_json: bool) -> None:
    """Check what Argosy stands on here, and say what to do where something is amiss.

    The exit code is 1 if anything fails; warnings cost comfort or speed only.
    """
    from argosy.process import judge_machine, measure_machine

    checks = judge_machine(measure_machine())
    if as_json:
        print_json(checks)
    else:
        show(checks)
    sys.exit(1 if any(check.state == "fail" for check in checks) else 0)


def show(checks: Sequence["Check"]) -> None:
    """Print the report; colours only where a terminal shows them."""
    width = min(shutil.get_terminal_size().columns, WIDTH_MAX)
    indent = max(len(check.name) for check in checks) + 8
    for check in checks:
        label = f"{click.style(check.state.ljust(4), fg=COLOURS[check.state])}  {check.name}"
        lines = textwrap.wrap(check.says, max(30, width - indent), break_on_hyphens=False)
        click.echo(f"{label}{' ' * (indent - 6 - len(check.name))}{lines[0]}")
        for line in lines[1:]:
            click.echo(f"{' ' * indent}{line}")
        if check.hint:
            click.echo(f"{' ' * indent}{click.style('-> ' + check.hint, bold=True)}")
    counts = {state: sum(check.state == state for check in checks) for state in COLOURS}
    warned = f"{counts['warn']} warning{'' if counts['warn'] == 1 else 's'}"
    click.echo(f"\n{counts['ok']} ok, {warned}, {counts['fail']} failed")
