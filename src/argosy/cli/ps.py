"""`argosy ps`: runs, their ranks, and Argosy's daemons."""

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from argosy.cli.tables import ago, print_json, print_table
from argosy.core import ArgosyError

if TYPE_CHECKING:
    from argosy.supervise import RankInfo, Runs

RANKS_SHOWN = 16
"""Ranks of a larger run are listed only when it is named."""


class Row(msgspec.Struct, kw_only=True):
    """One run, alive or not; `steps` are the fewest and the most among its ranks.

    `stopped` if it ended because somebody asked for it.
    """

    name: str
    dir: str
    state: str
    code: int | None = None
    stopped: bool = False
    size: int
    started_at: float
    steps: tuple[int, int]
    restarts: int
    detached: bool = False
    ranks: "list[RankInfo]"
    spares: list[int] = []


@click.command(short_help="List runs and their ranks.")
@click.argument("run", required=False)
@click.option("-a", "--all", "everything", is_flag=True, help="Ended runs and Argosy's own daemons too.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def command(run: str | None, everything: bool, as_json: bool) -> None:
    """List the runs that are alive on this machine; or show RUN, alive or ended, with all its ranks."""
    from argosy.supervise import find_run, indexed_runs, list_runs

    alive = list_runs(everywhere=True)
    living = [Path(each.directory) for each in alive.runs]
    ended = [directory for _, directory in indexed_runs() if directory not in living]
    if run is not None:
        shown = [row_of(find_run(run), alive)]
    else:
        directories = [*living, *ended] if everything else living
        shown = [row for directory in directories if (row := try_row(directory, alive)) is not None]
    if as_json:
        print_json(shown)
        return
    if shown:
        names = [row.name for row in shown]
        rows = [cells(row, row.dir if names.count(row.name) > 1 else row.name) for row in shown]
        print_table(["RUN", "STATE", "RANKS", "STARTED", "STEP", "RESTARTS"], rows, right=[2, 4, 5])
    else:
        print("no run is alive; `argosy ps --all` lists ended ones" if ended else "no run is alive")
    for row in shown:
        if run is not None or (Path(row.dir) in living and row.size <= RANKS_SHOWN):
            print(f"\n{row.name}" if len(shown) > 1 else "")
            print_ranks(row)
    if everything and alive.daemons:
        print()
        print_table(["DAEMON", "PID"], [[daemon.what, str(daemon.pid)] for daemon in alive.daemons], right=[1])
        print("daemons wait for the next run; `argosy stop --all` ends them")


def try_row(directory: Path, alive: "Runs") -> Row | None:
    """The run, unless its record cannot be read."""
    try:
        return row_of(directory, alive)
    except ArgosyError:
        return None


def row_of(directory: Path, alive: "Runs") -> Row:
    """A run as the agent knows it, or as its directory tells; `lost` if its end was not seen.

    Raises:
        ConfigError: the directory holds no run.
    """
    from argosy.supervise import ending_of, read_facts, read_record

    record = read_record(directory)
    ending = ending_of(read_facts(directory))
    living = next((run for run in alive.runs if run.directory == str(directory)), None)
    steps = [rank.steps for rank in living.ranks] if living else [record.steps]
    return Row(
        name=record.name,
        dir=str(directory),
        state=living.state if living else "ended" if record.state == "ended" else "lost",
        code=None if living else record.code,
        stopped=living is None and ending.stopped,
        size=record.size,
        started_at=record.started_at,
        steps=(min(steps), max(steps)),
        restarts=ending.restarts,
        detached=living is not None and living.detached,
        ranks=living.ranks if living else ending.ranks,
        spares=living.spares if living else [],
    )


def cells(row: Row, name: str) -> list[str]:
    """A run as a line of the table."""
    low, high = row.steps
    steps = "-" if not high else str(low) if low == high else f"{low}-{high}"
    how = "stopped" if row.stopped else "failed"
    state = row.state if row.code is None else "finished" if row.code == 0 else f"{how} ({row.code})"
    return [name, state, str(row.size), ago(row.started_at), steps, str(row.restarts)]


def print_ranks(row: Row) -> None:
    """The ranks of one run."""
    ranks = [
        [str(rank.index), rank.state, str(rank.steps or "-"), str(rank.generation), str(rank.pid or "-")]
        for rank in row.ranks
    ]
    ranks += [["-", "spare", "-", "-", str(pid)] for pid in row.spares]
    print_table(["RANK", "STATE", "STEP", "GENERATION", "PID"], ranks, right=[0, 2, 3, 4])
