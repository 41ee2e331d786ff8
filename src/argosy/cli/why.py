"""`argosy why`: one screen about a failed, hung or slow run."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from argosy.cli.tables import print_json, print_table

if TYPE_CHECKING:
    from argosy.supervise import Report, RunRecord, RunView

COLOURS = {"healthy": "green", "done": "green", "running": None, "stopped": "yellow"}
"""Of the first line, by verdict; the others are red."""


@click.command(short_help="Explain a failed, hung or slow run on one screen.")
@click.argument("run", default="last")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def command(run: str, as_json: bool) -> None:
    """Explain RUN: what failed first, its last lines, where the ranks were, what was restarted, what to do next."""
    from argosy.supervise import explain, find_run, read_facts, read_incidents, read_record

    directory = find_run(run)
    view = look(directory, read_record(directory))
    report = explain(view, read_facts(directory), read_incidents(directory))
    if as_json:
        print_json(report)
    else:
        show(report)


def look(directory: Path, record: "RunRecord") -> "RunView":
    """The run as its directory and the agent show it."""
    from argosy.supervise import RunView, list_runs

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
    """Print the report; in a terminal long lines are wrapped, except for commands to copy."""
    from argosy.supervise import sections

    *upper, commands = sections(report)
    for number, section in enumerate(upper):
        if section.title:
            click.secho(section.title, bold=True, fg=None if number else COLOURS.get(report.verdict, "red"))
        print_table([], section.rows, indent=2 if section.title else 0)
        print()
    for label, text in commands.rows:
        print(f"{label:8}{text}")
