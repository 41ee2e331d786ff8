"""`argosy report`: one HTML page about a run, or about a profiler trace that any program wrote."""

from pathlib import Path

import click


@click.command(short_help="Write one HTML page about a run or a trace.")
@click.argument("run", default="last")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Where to write it; by default in the run's directory."
)
def command(run: str, output: Path | None) -> None:
    """Write a page about RUN: what holds it back, its scalars, where the time of every rank went.

    The page is one file that needs nothing else and sends no request. RUN may also be a trace that torch.profiler
    wrote (trace.json, trace.json.gz), of any program.
    """
    from argosy.insight import open_run, report_trace

    if run.endswith((".json", ".json.gz")) and Path(run).is_file():
        target, lines = report_trace(Path(run), output)
        print("\n".join([*lines, str(target)]))
        return
    opened = open_run(run)
    print(opened.plot(output))
