"""`argosy why`: one screen about a failed, hung or slow run."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from argosy.cli.tables import print_json

if TYPE_CHECKING:
    from argosy.process import Report, RunRecord, RunView

STYLES = {"healthy": "bold green", "done": "bold green", "running": "bold", "stopped": "bold yellow"}


@click.command(short_help="Explain a failed, hung or slow run on one screen.")
@click.argument("run", default="last")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def command(run: str, as_json: bool) -> None:
    """Explain RUN: what failed first, its last lines, where the ranks were, what was restarted, what to do next."""
    from argosy.process import explain, find_run, read_facts, read_incidents, read_record, render

    directory = find_run(run)
    view = look(directory, read_record(directory))
    report = explain(view, read_facts(directory), read_incidents(directory))
    if as_json:
        print_json(report)
    elif sys.stdout.isatty():
        show(report)
    else:
        print(render(report))


def look(directory: Path, record: "RunRecord") -> "RunView":
    """The run as its directory and the agent show it."""
    from argosy.process import RunView, list_runs

    alive = list_runs(everywhere=True)
    living = next((each for each in alive.runs if each.directory == str(directory)), None)
    steps = [rank.steps for rank in living.ranks] if living else []
    saved = None if living else saved_step(directory)
    return RunView(
        name=record.name,
        directory=str(directory),
        argv=record.argv,
        cwd=record.cwd,
        named=record.named,
        resumes=record.managed or saved is not None,
        state="running" if living else "ended" if record.state == "ended" else "lost",
        supervised=living is None or living.supervised,
        size=record.size,
        started_at=record.started_at,
        now=time.time(),
        code=record.code,
        steps=(min(steps), max(steps)) if any(steps) else None,
        durable_step=saved,
    )


def saved_step(directory: Path) -> int | None:
    """The newest checkpoint in the run's directory."""
    if not (directory / "checkpoints").is_dir():
        return None
    from argosy.checkpoint import list_steps  # Half a second.

    return next((each.step for each in list_steps(str(directory)) if not each.fault), None)


def show(report: "Report") -> None:
    """Write the report to a terminal: long lines are wrapped, commands are not."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    from argosy.process import sections

    console = Console(highlight=False)
    *upper, commands = sections(report)
    for number, section in enumerate(upper):
        if section.title:
            console.print(Text(section.title, "bold" if number else STYLES.get(report.verdict, "bold red")))
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(overflow="fold")
        table.add_column(overflow="fold")
        for row in section.rows:
            table.add_row(*(Text(cell) for cell in row))
        console.print(Padding(table, (0, 0, 1, 2 if section.title else 0)))
    for label, text in commands.rows:
        console.print(Text(f"{label:8}", "dim") + Text(text, "cyan"), soft_wrap=True)
