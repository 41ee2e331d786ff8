"""`argosy report`: one HTML page about a run, or about a profiler trace that any program wrote."""

from pathlib import Path

import click

from argosy.cli.tables import print_json


@click.command(short_help="Write one HTML page about a run or a trace.")
@click.argument("run", default="last")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Where to write it; by default in the run's directory."
)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def command(run: str, output: Path | None, as_json: bool) -> None:
    """Write a page about RUN: what holds it back, its scalars, where the time of every rank went.

    The page is one file that needs nothing else and sends no request. RUN may also be a trace that torch.profiler
    wrote (trace.json, trace.json.gz), of any program.
    """
    from argosy.insight import open_run, report_trace, trace_lines

    if run.endswith((".json", ".json.gz")) and Path(run).is_file():
        target, summary, verdicts = report_trace(Path(run), output)
        if as_json:
            print_json({"page": str(target), "trace": summary, "verdicts": verdicts})
        else:
            print("\n".join([*trace_lines(summary, verdicts), str(target)]))
        return
    opened = open_run(run)
    page = opened.plot(output)
    if as_json:
        found = {"page": str(page), "speed": opened.speed(), "ledger": opened.ledger(), "verdicts": opened.verdicts()}
        print_json(found)
    else:
        print(page)
