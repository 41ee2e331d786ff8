"""`argosy why`: one screen about a failed, hung or slow run."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

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
        print_json({**msgspec.to_builtins(report), "speed": speed_of(directory)})
    else:
        show(report, directory)


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


def speed_of(directory: Path) -> dict[str, Any] | None:
    """How fast the run is and what holds it back; None if it recorded no steps."""
    if not (directory / "metrics").is_dir():
        return None
    from argosy.insight import OpenedRun

    run = OpenedRun(directory)
    if not run.has_steps:
        return None
    return {**msgspec.to_builtins(run.speed()), "ledger": run.ledger(), "verdicts": msgspec.to_builtins(run.verdicts())}


def show_speed(directory: Path) -> None:
    """Print how fast the run is and what holds it back."""
    if (directory / "metrics").is_dir():
        from argosy.insight import OpenedRun, speed_lines

        lines = speed_lines(OpenedRun(directory))
        if lines:
            click.secho("speed", bold=True)
            print_table([], [(line,) for line in lines], indent=2)
            print()


def show(report: "Report", directory: Path) -> None:
    """Print the report; in a terminal long lines are wrapped, except for commands to copy."""
    from argosy.supervise import sections

    *upper, commands = sections(report)
    for number, section in enumerate(upper):
        if section.title:
            click.secho(section.title, bold=True, fg=None if number else COLOURS.get(report.verdict, "red"))
        print_table([], section.rows, indent=2 if section.title else 0)
        print()
    show_speed(directory)
    for label, text in commands.rows:
        print(f"{label:8}{text}")
