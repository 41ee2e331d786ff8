"""`argosy export`: give a run's records to other programs."""

from pathlib import Path

import click


@click.command(short_help="Write a run's records for other programs.")
@click.argument("run", default="last")
@click.option(
    "--format",
    "form",
    type=click.Choice(["csv", "json", "parquet", "perfetto", "otlp"]),
    default="csv",
    show_default=True,
    help="Tables (csv, json, parquet), spans for Perfetto, or OpenTelemetry's JSON.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="A directory; by default `export` in the run's.")
@click.option("--to", metavar="URL", help="Send OTLP to this collector instead: http://localhost:4318.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def command(run: str, form: str, output: Path | None, to: str | None, as_json: bool) -> None:
    """Write what RUN recorded: every table of `argosy sql`, or its spans and scalars."""
    from argosy.cli.tables import print_json
    from argosy.insight import export_run, open_run, send_otlp

    opened = open_run(run)
    if to is not None:
        sent = send_otlp(opened, to)
        print_json({"requests": sent}) if as_json else print(f"{sent} requests to {to}")
        return
    paths = export_run(opened, form, output or opened.directory / "export")
    if as_json:
        print_json([str(path) for path in paths])
    else:
        print("\n".join(map(str, paths)))
