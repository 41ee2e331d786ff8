"""`argosy ps`: runs, ranks, and what lingers."""

from typing import TYPE_CHECKING

import click
import msgspec

from argosy.cli.tables import ago, print_json, print_table
from argosy.core import ArgosyError

if TYPE_CHECKING:
    from argosy.process import RankInfo, Runs


class Row(msgspec.Struct, kw_only=True):
    """One run, alive or not."""

    name: str
    dir: str
    state: str
    code: int | None = None
    size: int
    started_at: float
    detached: bool = False
    ranks: "list[RankInfo]" = []
    spares: list[int] = []


@click.command(short_help="List runs and their ranks.")
@click.option("-a", "--all", "everything", is_flag=True, help="Ended runs and Argosy's own daemons too.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def command(everything: bool, as_json: bool) -> None:
    """List the runs that are alive on this machine, with their ranks."""
    from argosy.process import list_runs

    alive = list_runs(everywhere=True)
    living, ended = living_rows(alive), ended_rows({run.directory for run in alive.runs})
    shown = [*living, *ended] if everything else living
    if as_json:
        print_json(shown)
        return
    if shown:
        names = [row.name for row in shown]
        twice = {name for name in names if names.count(name) > 1}
        print_table(["RUN", "STATE", "RANKS", "STARTED", "STEPS"], [cells(row, row.name in twice) for row in shown])
    else:
        print("no run is alive; `argosy ps --all` lists ended ones" if ended else "no run is alive")
    for row in living:
        if row.size <= 16:
            print()
            ranks = [["", str(r.index), str(r.pid or "-"), str(r.generation), r.state, str(r.steps)] for r in row.ranks]
            ranks += [["", "-", str(pid), "-", "spare", "-"] for pid in row.spares]
            print_table([row.name, "RANK", "PID", "GENERATION", "STATE", "STEPS"], ranks)
    if everything and alive.daemons:
        print()
        print_table(["DAEMON", "PID"], [[daemon.what, str(daemon.pid)] for daemon in alive.daemons])
        print("they wait for the next run; `argosy stop --all` ends them")


def living_rows(alive: "Runs") -> list[Row]:
    """What the agent knows."""
    return [
        Row(
            name=run.name,
            dir=run.directory,
            state=run.state,
            size=run.size,
            started_at=run.started_at,
            detached=run.detached,
            ranks=run.ranks,
            spares=run.spares,
        )
        for run in alive.runs
    ]


def ended_rows(living: set[str]) -> list[Row]:
    """What the index knows and nobody runs; `lost` if it never came to its end."""
    from argosy.process import indexed_runs, read_record

    rows: list[Row] = []
    for _, directory in indexed_runs():
        if str(directory) in living:
            continue
        try:
            record = read_record(directory)
        except ArgosyError:
            continue
        state = "ended" if record.state == "ended" else "lost"
        rows.append(
            Row(
                name=record.name,
                dir=str(directory),
                state=state,
                code=record.code,
                size=record.size,
                started_at=record.started_at,
            )
        )
    return rows


def cells(row: Row, ambiguous: bool) -> list[str]:
    """A run as a line of the table, by its directory where its name does not tell which."""
    steps = [rank.steps for rank in row.ranks]
    low, high = min(steps, default=0), max(steps, default=0)
    shown = "" if not steps else str(low) if low == high else f"{low}-{high}"
    state = row.state if row.code is None else f"{row.state} ({row.code})"
    return [row.dir if ambiguous else row.name, state, str(row.size), ago(row.started_at), shown]
