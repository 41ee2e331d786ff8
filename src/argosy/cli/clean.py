"""`argosy clean`: remove what ended runs left, by name, age and size."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from argosy.cli.tables import ago, print_json, print_table

if TYPE_CHECKING:
    from argosy.cli.clean_plan import Item, Removal

NAME_WIDTH = 30
HOW_TO = """
Nothing was removed. Say what to remove; --dry-run shows it first:
  argosy clean RUN...              these runs; `leftovers`: of killed daemons
  argosy clean --older-than 7d     runs that ended more than 7 days ago
  argosy clean --larger-than 1G    runs that take more than 1 GB
  argosy clean --all               everything that is not alive, and the cache
Runs with checkpoints are kept unless you add --checkpoints."""


@click.command(short_help="Remove files of ended runs.")
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("--older-than", metavar="7d", help="Only runs that ended longer ago: 30min, 12h, 7d, 2w.")
@click.option("--larger-than", metavar="1G", help="Only runs that take more disk space: 500M, 1G.")
@click.option("--all", "everything", is_flag=True, help="Every ended run, leftovers, the cache, idle daemons.")
@click.option("--checkpoints", is_flag=True, help="Remove checkpoints of these runs too; asks first.")
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
    """Remove logs, incidents and leftovers of runs that have ended. A running run is never touched.

    A run's directory is removed if all its files are Argosy's; otherwise only those files are.
    Without a selection this lists what there is.
    """
    from argosy.cli.clean_find import find_items
    from argosy.cli.clean_plan import Selection, parse_age, parse_size, plan_cleaning

    found = find_items()
    selection = Selection(
        directories=frozenset(resolve(text, found) for text in runs if text != "leftovers"),
        leftovers="leftovers" in runs,
        everything=everything,
        older_than_s=parse_age(older_than) if older_than else None,
        larger_than=parse_size(larger_than) if larger_than else None,
        checkpoints=checkpoints,
    )
    if not selection.given:
        show_all(found, as_json)
        return
    decisions = plan_cleaning(found, selection, time.time())
    if not as_json:
        show_plan(decisions)
    going = [each for each in decisions if each.action != "keep"]
    if not dry_run and not yes and (doomed := [each for each in going if each.checkpoints]):
        confirm(sum(each.checkpoints for each in doomed), len(doomed))
    carry_out(decisions, dry_run=dry_run, everything=everything, as_json=as_json)


def resolve(text: str, found: "list[Item]") -> str:
    """The path of a run among the items; a run that is not in the index is added to them."""
    from argosy.cli.clean_find import look_at_run
    from argosy.supervise import find_run

    directory = find_run(text)
    for item in found:
        if item.kind == "run" and Path(item.path).resolve() == directory.resolve():
            return item.path
    found.append(look_at_run(directory))
    return str(directory)


def show_all(items: Sequence["Item"], as_json: bool) -> None:
    """List what there is, and how to select from it."""
    from argosy.cli.clean_plan import count, format_bytes

    if as_json:
        print_json([describe(item) for item in items])
        return
    rows: list[list[str]] = []
    for item, name in zip(items, names_of(items), strict=True):
        notes = [] if item.kind == "run" else [item.kind]
        notes += [count(len(item.checkpoints), "checkpoint file")] if item.checkpoints else []
        notes += [f"{count(item.strangers, 'file')} not Argosy's"] if item.strangers else []
        since = "running" if item.alive or item.kind == "daemons" else ago(item.since) if item.since else "-"
        rows.append([name, since, format_bytes(item.bytes), ", ".join(notes)])
    if not rows:
        print("there is nothing to clean")
        return
    rows.append(["total", "", format_bytes(sum(item.bytes for item in items)), ""])
    print_table(["RUN", "ENDED", "SIZE", "NOTES"], rows, right=[2])
    print(HOW_TO)


def describe(item: "Item") -> dict[str, object]:
    """An item for a program to read."""
    return {
        **{name: getattr(item, name) for name in ("kind", "name", "path", "bytes", "strangers")},
        "alive": bool(item.alive) or item.kind == "daemons",
        "ended_at": item.since if item.kind == "run" and not item.alive else None,
        "checkpoints": len(item.checkpoints),
    }


def show_plan(decisions: Sequence["Removal"]) -> None:
    """The same table for --dry-run and for the removal."""
    from argosy.cli.clean_plan import format_bytes

    rows = [
        [name, each.action, format_bytes(each.bytes) if each.files else "-", each.reason]
        for each, name in zip(decisions, names_of([each.item for each in decisions]), strict=True)
    ]
    if rows:
        print_table(["RUN", "ACTION", "SIZE", "WHY"], rows, right=[2])


def carry_out(decisions: Sequence["Removal"], *, dry_run: bool, everything: bool, as_json: bool) -> None:
    """Remove, and report what was removed."""
    from argosy.cli.clean_do import remove, remove_empty
    from argosy.cli.clean_plan import format_bytes

    going = [each for each in decisions if each.action != "keep"]
    troubles = {} if dry_run else {each.item.path: trouble for each in going if (trouble := remove(each))}
    if everything and not dry_run:
        remove_empty()
    if as_json:
        done = {each.item.path for each in going if not dry_run} - troubles.keys()
        print_json(
            [
                {
                    **describe(each.item),
                    **{name: getattr(each, name) for name in ("action", "reason", "bytes", "checkpoints")},
                    "done": each.item.path in done,
                    "trouble": troubles.get(each.item.path, ""),
                }
                for each in decisions
            ]
        )
    else:
        freed = format_bytes(sum(each.bytes for each in going if each.item.path not in troubles))
        print(f"nothing was removed (--dry-run); {freed} would be" if dry_run else f"removed {freed}")
        for path, trouble in troubles.items():
            print(f"argosy: not removed: {path}: {trouble}", file=sys.stderr)
    if troubles:
        sys.exit(1)


def confirm(files: int, runs: int) -> None:
    """Ask before checkpoints are removed.

    Raises:
        ConfigError: there is no terminal to ask at.
    """
    from argosy.cli.clean_plan import count
    from argosy.core import ConfigError

    if not sys.stdin.isatty():
        raise ConfigError(f"cannot ask before {files} files of checkpoints are removed: no terminal", hint="add -y")
    click.confirm(f"Remove {count(files, 'checkpoint file')} of {count(runs, 'run')} for good?", abort=True)


def names_of(items: Sequence["Item"]) -> list[str]:
    """How the items are called: runs of one name by their directories."""
    names = [item.name for item in items]
    return [short(item.path if names.count(item.name) > 1 else item.name) for item in items]


def short(name: str) -> str:
    """A name that leaves room in 80 columns: its end says more."""
    return name if len(name) <= NAME_WIDTH else f"…{name[1 - NAME_WIDTH :]}"
