"""`argosy clean`: remove what ended runs left, by name, age and size."""

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from argosy.cli.tables import ago, print_json, print_table

if TYPE_CHECKING:
    from argosy.process import Leftover, Removal, RunRemains, Selection

NAME_WIDTH = 30
HOW_TO = """
Nothing was removed. Select what shall go; --dry-run shows what would:
  argosy clean RUN...              these runs; `leftovers`: of killed daemons
  argosy clean --older-than 7d     runs that ended before that
  argosy clean --larger-than 1G    runs that take more than that
  argosy clean --all               everything that is not alive, and the cache
Runs with checkpoints stay, unless you add --checkpoints."""


@click.command(short_help="Remove logs and evidence of ended runs.")
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("--older-than", metavar="7d", help="Only what ended longer ago: 30min, 12h, 7d, 2w.")
@click.option("--larger-than", metavar="1G", help="Only what takes more disk space: 500M, 1G.")
@click.option("--all", "everything", is_flag=True, help="Every ended run, leftovers, cache, idle daemons.")
@click.option("--checkpoints", is_flag=True, help="Checkpoints of these runs too; asks first.")
@click.option("--dry-run", is_flag=True, help="Show what would be removed, and remove nothing.")
@click.option("-y", "--yes", is_flag=True, help="Remove checkpoints without asking.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def command(
    runs: tuple[str, ...],
    older_than: str | None,
    larger_than: str | None,
    everything: bool,
    checkpoints: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Remove logs, incidents and leftovers of runs that have ended; never a run that is alive.

    A run's directory goes as a whole if it holds nothing but what Argosy wrote, else only that goes.
    Without a selection this lists what there is.
    """
    from argosy.process import (
        Selection,
        find_leftovers,
        find_runs,
        look_at_run,
        parse_age,
        parse_size,
        plan_cleaning,
    )

    found = find_runs()
    directories: set[str] = set()
    for text in runs:
        if text != "leftovers":
            directory = resolve(text, found)
            directories.add(directory)
            if directory not in {run.directory for run in found}:
                from pathlib import Path

                found.append(look_at_run(Path(directory)))
    selection = Selection(
        directories=frozenset(directories),
        leftovers="leftovers" in runs,
        everything=everything,
        older_than_s=parse_age(older_than) if older_than else None,
        larger_than=parse_size(larger_than) if larger_than else None,
        checkpoints=checkpoints,
    )
    leftovers = find_leftovers()
    if not selection.given:
        show_all(found, leftovers, as_json)
        return
    decisions = plan_cleaning(found, leftovers, selection, time.time())
    carry_out(decisions, selection, dry_run=dry_run, yes=yes, as_json=as_json)


def resolve(text: str, found: Sequence["RunRemains"]) -> str:
    """The directory of a run, spelled as in the index if it is there."""
    from pathlib import Path

    from argosy.process import find_run

    directory = find_run(text)
    same = [run.directory for run in found if Path(run.directory).resolve() == directory.resolve()]
    return same[0] if same else str(directory)


def show_all(runs: Sequence["RunRemains"], leftovers: Sequence["Leftover"], as_json: bool) -> None:
    """List what there is, and how to select from it."""
    from argosy.process import format_bytes

    if as_json:
        print_json([*(describe_run(run) for run in runs), *(describe_leftover(each) for each in leftovers)])
        return
    rows: list[list[str]] = []
    for run in runs:
        rows.append([short(run.name), run.alive or ago(run.ended_at), format_bytes(run.bytes), notes(run)])
    rows += [[short(each.path), says(each), format_bytes(each.bytes), each.kind] for each in leftovers]
    if not rows:
        print("there is nothing to clean")
        return
    total = sum(run.bytes for run in runs) + sum(each.bytes for each in leftovers)
    print_table(["RUN", "ENDED", "SIZE", ""], align([*rows, ["", "", format_bytes(total), "in all"]]))
    print(HOW_TO)


def describe_run(run: "RunRemains") -> dict[str, object]:
    """A run for a program to read."""
    return {
        "kind": "run",
        "name": run.name,
        "path": run.directory,
        "bytes": run.bytes,
        "alive": bool(run.alive),
        "ended_at": None if run.alive else run.ended_at,
        "checkpoints": len(run.checkpoints),
        "strangers": run.strangers,
    }


def describe_leftover(each: "Leftover") -> dict[str, object]:
    """A leftover for a program to read."""
    alive = each.kind == "daemons"
    return {"kind": each.kind, "name": each.path, "path": each.path, "bytes": each.bytes, "alive": alive}


def describe_removal(each: "Removal", done: bool, trouble: str) -> dict[str, object]:
    """A decision and what became of it, for a program to read."""
    return {
        "kind": each.kind,
        "name": each.name,
        "path": each.path,
        "action": each.action,
        "reason": each.reason,
        "bytes": each.bytes,
        "checkpoints": each.checkpoints,
        "done": done,
        "trouble": trouble,
    }


def says(leftover: "Leftover") -> str:
    """The column of a leftover that runs have their end in."""
    if leftover.kind == "daemons":
        return "alive"
    return "-" if leftover.kind == "cache" else ago(leftover.since)


def notes(run: "RunRemains") -> str:
    """What is worth knowing before one selects a run."""
    parts = [f"checkpoints: {len(run.checkpoints)}"] if run.checkpoints else []
    if run.strangers:
        parts.append(f"not Argosy's: {run.strangers}")
    return ", ".join(parts)


def carry_out(
    decisions: Sequence["Removal"], selection: "Selection", *, dry_run: bool, yes: bool, as_json: bool
) -> None:
    """Show the decisions, ask where checkpoints go, and do it."""
    from argosy.process import format_bytes, remove, remove_empty

    going = [each for each in decisions if each.action != "keep"]
    doomed = sum(each.checkpoints for each in going)
    if not as_json:
        show_plan(decisions)
    if not dry_run and doomed and not yes:
        confirm(doomed, sum(1 for each in going if each.checkpoints))
    troubles: dict[str, str] = {}
    if not dry_run:
        for each in going:
            if trouble := remove(each):
                troubles[each.path] = trouble
        if selection.everything:
            remove_empty()
    if as_json:
        done = {each.path for each in going if not dry_run} - troubles.keys()
        print_json([describe_removal(each, each.path in done, troubles.get(each.path, "")) for each in decisions])
    else:
        freed = format_bytes(sum(each.bytes for each in going if each.path not in troubles))
        print(f"nothing was removed: --dry-run; it would be {freed}" if dry_run else f"{freed} removed")
        for path, trouble in troubles.items():
            print(f"argosy: not removed: {path}: {trouble}", file=sys.stderr)
    if troubles:
        sys.exit(1)


def show_plan(decisions: Sequence["Removal"]) -> None:
    """The same table for a rehearsal and for the deed."""
    from argosy.process import format_bytes

    words = {"remove": "remove", "part": "in part", "keep": "keep"}
    rows: list[list[str]] = []
    for each in decisions:
        size = "-" if each.action == "keep" else format_bytes(each.bytes)
        rows.append([short(each.name), words[each.action], size, each.reason])
    if rows:
        print_table(["RUN", "", "SIZE", "WHY"], align(rows))


def confirm(files: int, runs: int) -> None:
    """Ask before checkpoints go.

    Raises:
        ConfigError: nobody is there to answer.
    """
    from argosy.core import ConfigError

    if not sys.stdin.isatty():
        raise ConfigError(f"nobody can be asked if checkpoints may go: {files}", hint="add -y if they may")
    click.confirm(f"Remove checkpoints of {runs} run{'s' * (runs > 1)} for good (files: {files})?", abort=True)


def short(name: str) -> str:
    """A name that leaves room in 80 columns: its end tells more."""
    return name if len(name) <= NAME_WIDTH else f"…{name[1 - NAME_WIDTH :]}"


def align(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Sizes to the right."""
    width = max(len(row[2]) for row in rows)
    return [[*row[:2], row[2].rjust(width), *row[3:]] for row in rows]
