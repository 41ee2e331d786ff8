"""`argosy stop`: stop a run, or all runs and the daemons."""

import contextlib
import signal
import time

import click

from argosy.cli.launch_builder import check_seconds
from argosy.cli.tables import print_json
from argosy.core import DeadlinePassed, PeerLost


@click.command(short_help="Stop a run, or everything.")
@click.argument("run", required=False)
@click.option("--all", "everything", is_flag=True, help="Stop every run, then Argosy's own daemons.")
@click.option("--grace", type=float, help="Seconds between SIGTERM and SIGKILL. Default: the run's own.")
@click.option("--dry-run", is_flag=True, help="Show what would be stopped, and stop nothing.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def command(run: str | None, everything: bool, grace: float | None, dry_run: bool, as_json: bool) -> None:
    """Stop RUN (default: `last`): SIGTERM, then SIGKILL after the grace period. Waits until it has ended."""
    from argosy.supervise import StopRun, ask, find_living, list_runs, reach_agent

    check_seconds("grace", grace)
    if everything:
        alive = list_runs()
        daemons = bool(alive.daemons) if dry_run else shut_down()
        report([living.name for living in alive.runs], daemons, dry_run=dry_run, as_json=as_json)
        return
    living = find_living(run or "last")
    if not dry_run:
        ask(reach_agent(), StopRun(living.run, "argosy stop", signal.SIGTERM, grace))
        wait_until_gone(living.directory)
    report([living.name], False, dry_run=dry_run, as_json=as_json)


def report(names: list[str], daemons: bool, *, dry_run: bool, as_json: bool) -> None:
    """Print what was stopped, or would be."""
    if as_json:
        print_json({"runs": names, "daemons": daemons, "done": not dry_run})
        return
    parts = [", ".join(names)] * bool(names) + ["Argosy's daemons"] * daemons
    if not parts:
        print("nothing is running")
    else:
        print(f"{'would stop' if dry_run else 'stopped'} {' and '.join(parts)}")


def wait_until_gone(directory: str, patience_s: float = 120.0) -> None:
    """Wait for the end of a run that was asked to stop."""
    from argosy.supervise import list_runs

    deadline = time.monotonic() + patience_s
    while any(run.directory == directory for run in list_runs().runs):
        if time.monotonic() > deadline:
            raise DeadlinePassed(f"the end of {directory}", patience_s)
        time.sleep(0.05)


def shut_down(patience_s: float = 120.0) -> bool:
    """Stop all runs and the daemons, and wait until they are gone; False if there were none.

    If daemons were killed, new ones start to remove the files that they left.
    """
    from argosy.fabric import runtime_dir
    from argosy.supervise import end_daemons

    lock = runtime_dir() / "warden.lock"
    deadline = time.monotonic() + patience_s
    found = lock.exists()
    while lock.exists():
        with contextlib.suppress(PeerLost):
            end_daemons("argosy stop --all", deadline - time.monotonic())
        if time.monotonic() > deadline:
            raise DeadlinePassed("the end of the warden", patience_s)
    return found
