"""`argosy ps`: runs, ranks, and what lingers."""

import click

from argosy.cli.tables import ago, print_json, print_table


@click.command(short_help="List runs and their ranks.")
@click.option("-a", "--all", "everything", is_flag=True, help="Ended runs and Argosy's own daemons too.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def command(everything: bool, as_json: bool) -> None:
    """List the runs that are alive on this machine, with their ranks."""
    from argosy.core import ArgosyError
    from argosy.process import indexed_runs, list_runs, read_record

    alive = list_runs()
    living = {run.directory: run for run in alive.runs}
    ended: list[dict[str, object]] = []
    for _, directory in indexed_runs():
        if str(directory) not in living:
            try:
                record = read_record(directory)
            except ArgosyError:
                continue
            state = "ended" if record.state == "ended" else "lost"
            ended.append(
                {
                    "name": record.name,
                    "dir": str(directory),
                    "state": state,
                    "code": record.code,
                    "size": record.size,
                    "started_at": record.started_at,
                    "ranks": [],
                }
            )
    if as_json:
        running = [
            {
                "name": run.name,
                "dir": run.directory,
                "state": run.state,
                "code": None,
                "size": run.size,
                "started_at": run.started_at,
                "detached": run.detached,
                "ranks": run.ranks,
            }
            for run in alive.runs
        ]
        print_json([*running, *ended])
        return
    rows = [
        [run.name, run.state, str(run.size), ago(run.started_at), steps_of([rank.steps for rank in run.ranks])]
        for run in alive.runs
    ]
    if everything:
        rows += [
            [str(run["name"]), f"{run['state']} ({run['code']})", str(run["size"]), ago(float(str(run["started_at"]))), ""]
            for run in ended
        ]
    if rows:
        print_table(["RUN", "STATE", "RANKS", "STARTED", "STEPS"], rows)
    else:
        print("no run is alive; `argosy ps --all` lists ended ones" if ended else "no run is alive")
    for run in alive.runs:
        if run.size <= 16:
            print()
            print_table(
                [run.name, "RANK", "PID", "GENERATION", "STATE", "STEPS"],
                [["", str(r.index), str(r.pid or "-"), str(r.generation), r.state, str(r.steps)] for r in run.ranks],
            )
    if everything and alive.daemons:
        print()
        print_table(["DAEMON", "PID"], [[daemon.what, str(daemon.pid)] for daemon in alive.daemons])
        print("they wait for the next run; `argosy stop --all` ends them")


def steps_of(steps: list[int]) -> str:
    """`12`, or `11-12` where ranks differ."""
    low, high = min(steps, default=0), max(steps, default=0)
    return str(low) if low == high else f"{low}-{high}"
