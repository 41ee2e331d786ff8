"""`argosy why`: one screen about a failed, hung or slow run."""

import shutil
import sys
import time

import click


@click.command(short_help="Explain a failed, hung or slow run on one screen.")
@click.argument("run", default="last")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def command(run: str, as_json: bool) -> None:
    """Explain RUN: what failed first, the last lines, where the ranks were, what was restarted, how to go on."""
    from argosy.process import (
        RunView,
        explain,
        find_run,
        list_runs,
        read_facts,
        read_incidents,
        read_record,
        render,
    )

    directory = find_run(run)
    record = read_record(directory)
    alive = list_runs(everywhere=True)
    living = next((each for each in alive.runs if each.directory == str(directory)), None)
    steps = [rank.steps for rank in living.ranks] if living else []
    view = RunView(
        name=record.name,
        directory=str(directory),
        argv=record.argv,
        state="running" if living else "ended" if record.state == "ended" else "lost",
        supervised=living is None or living.supervised,
        size=record.size,
        started_at=record.started_at,
        now=time.time(),
        code=record.code,
        steps=(min(steps), max(steps)) if any(steps) else None,
    )
    report = explain(view, read_facts(directory), read_incidents(directory))
    if as_json:
        from argosy.cli.tables import print_json

        print_json(report)
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 100
        print(render(report, width))
