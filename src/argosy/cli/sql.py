"""`argosy sql`: ask a run a question in SQL."""

import csv
import sys

import click

from argosy.cli.tables import print_json, print_table


@click.command(short_help="Ask a run a question in SQL.")
@click.argument("run")
@click.argument("query", required=False)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@click.option("--csv", "as_csv", is_flag=True, help="Comma-separated, for other programs.")
def command(run: str, query: str | None, as_json: bool, as_csv: bool) -> None:
    """Answer one SELECT about RUN; without QUERY, list its tables and their columns."""
    from argosy.insight import open_run

    opened = open_run(run)
    if query is None:
        tables = opened.tables
        rows = [[name, str(len(next(iter(columns.values())))), ", ".join(columns)] for name, columns in tables.items()]
        print_table(["TABLE", "ROWS", "COLUMNS"], rows, right=[1])
        return
    answer = opened.sql(query)
    if as_json:
        print_json([dict(zip(answer.columns, row, strict=True)) for row in answer.rows])
    elif as_csv:
        csv.writer(sys.stdout).writerows([answer.columns, *answer.rows])
    else:
        print_table(answer.columns, [[_text(cell) for cell in row] for row in answer.rows])


def _text(cell: object) -> str:
    return f"{cell:.6g}" if isinstance(cell, float) else str(cell)
