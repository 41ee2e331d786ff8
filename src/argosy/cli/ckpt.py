"""`argosy ckpt`: look at checkpoints, check them, and carry them to other formats and back."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from argosy.cli.tables import ago, print_json, print_table
from argosy.core import ConfigError

if TYPE_CHECKING:
    from argosy.checkpoint import StepInfo

_json = click.option("--json", "as_json", is_flag=True, help="Machine-readable.")


def find_place(_context: click.Context, _parameter: click.Parameter, text: str) -> str:
    """The directory or URL that holds the checkpoints, also by the name of its run.

    Raises:
        ConfigError: there is none.
    """
    from argosy.process import find_run

    if "://" in text or Path(text).is_dir():
        return text
    if "/" in text:
        what = "not a directory" if Path(text).exists() else "no such directory"
        raise ConfigError(f"{what}: {text}", hint="give a run's directory, or a name of `argosy ps --all`")
    return str(find_run(text))


_place = click.argument("directory", metavar="RUN", callback=find_place)
_step = click.option("--step", type=int, help="A step; the newest if not given.")


@click.group(short_help="List, verify, compare and convert checkpoints.")
def command() -> None:
    """List, verify, compare and convert the checkpoints of a run: its directory, its URL, or its name."""


def amount(count: float) -> str:
    """`1.2 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def counted(count: int, what: str) -> str:
    """`1 tensor`, `2 tensors`."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def some(names: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def once(steps: "Sequence[StepInfo]") -> "list[StepInfo]":
    """Each step once: of one that was saved again, as with a tag, the newer."""
    newest: dict[tuple[int, int, str], StepInfo] = {}
    for each in sorted(steps, key=lambda each: each.saved_at):
        newest[each.era, each.step, each.fault] = each
    return [each for each in steps if newest[each.era, each.step, each.fault] is each or each.tags]


@command.command()
@_place
@_json
def ls(directory: str, as_json: bool) -> None:
    """List the committed steps, newest first."""
    from argosy.checkpoint import list_steps

    steps = list_steps(directory)
    if as_json:
        print_json(steps)
        return
    if not steps:
        print("no step was committed here")
        return
    rows: list[list[str]] = []
    for each in once(steps):
        notes = [f"tag {tag}" for tag in each.tags] + ["pinned"] * each.pinned + [each.fault] * bool(each.fault)
        notes += [f"{name} {value:g}" for name, value in each.metrics.items()]
        saved = ago(each.saved_at) if each.saved_at else "?"
        rows.append([str(each.step), saved, amount(each.bytes), str(each.ranks), ", ".join(notes)])
    print_table(["STEP", "SAVED", "SIZE", "RANKS", "NOTES"], rows)


@command.command()
@_place
@_step
@_json
def show(directory: str, step: int | None, as_json: bool) -> None:
    """Show the tensors of a step, with their digests."""
    from argosy.checkpoint import opened, tensors

    found = list(tensors(opened(directory, step)).values())
    if as_json:
        print_json(found)
        return
    rows = [
        [each.name, each.role, each.dtype, "x".join(map(str, each.shape)) or "-", amount(each.bytes), each.digest[:12]]
        for each in found
    ]
    print_table(["NAME", "ROLE", "DTYPE", "SHAPE", "SIZE", "DIGEST"], rows)


@command.command()
@_place
@click.option("--step", type=int, help="A step; all if not given.")
@_json
def verify(directory: str, step: int | None, as_json: bool) -> None:
    """Read every byte and check it; exits 1 if anything is damaged."""
    from argosy.checkpoint import list_steps
    from argosy.checkpoint import verify as check

    total = sum(each.bytes for each in list_steps(directory) if step in (None, each.step))
    faults: list[str] = []
    with click.progressbar(length=total, label="verifying", file=sys.stderr) as bar:
        faults += check(directory, step, bar.update)
    if as_json:
        print_json({"bytes": total, "faults": faults})
    else:
        for fault in faults:
            print(fault)
        print(f"{amount(total)} read, {len(faults)} faults")
    sys.exit(1 if faults else 0)


@command.command()
@_place
@click.argument("first", type=int)
@click.argument("second", type=int)
@_json
def diff(directory: str, first: int, second: int, as_json: bool) -> None:
    """Say which tensors changed between two steps, and by how much."""
    from argosy.checkpoint import diff as compare

    found = compare(directory, first, second)
    if as_json:
        print_json(found)
        return

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.3g}"

    rows = [[each.name, each.kind, number(each.max_abs), number(each.relative)] for each in found]
    print_table(["NAME", "WHAT", "LARGEST", "RELATIVE"], rows) if rows else print("no tensor differs")


@command.command()
@_place
@click.argument("kind", type=click.Choice(["hf", "dcp", "torch"]))
@click.argument("target", type=click.Path(path_type=Path))
@_step
def export(directory: str, kind: str, target: Path, step: int | None) -> None:
    """Write a step in another format: Hugging Face safetensors, DCP, or torch.save."""
    from argosy.checkpoint import export as write

    found = write(directory, kind, target, step)
    count = len({id(tensor) for tensor in found.tensors.values()})
    print(f"step {found.step:,} written to {target} ({counted(count, 'tensor')}, {amount(found.bytes)}, verified)")
    for reason in found.skipped:
        print(f"passed over {reason}")
    if found.unused:
        print(f"left out {len(found.unused)}, as {kind} holds weights alone: {some(found.unused)}")


@command.command(name="import")
@click.argument("kind", type=click.Choice(["hf", "dcp", "torch"]))
@click.argument("source", type=click.Path(path_type=Path, exists=True))
@click.argument("directory")
@click.option("--step", type=int, help="The step that it becomes; 0 if not given.")
def import_(kind: str, source: Path, directory: str, step: int | None) -> None:
    """Make a committed step of another format's files."""
    from argosy.checkpoint import import_ as read

    count = read(kind, source, directory, step)
    print(f"{counted(count, 'tensor')} committed as step {step or 0} of {directory}")


@command.command()
@_place
@click.option("--keep-last", type=int, default=3, show_default=True, help="How many of the newest to keep.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@_json
def prune(directory: str, keep_last: int, dry_run: bool, as_json: bool) -> None:
    """Delete old steps; tagged and pinned ones stay, and whatever a kept one refers to."""
    from argosy.checkpoint import KeepLast, prune_steps

    gone, kept = prune_steps(directory, [KeepLast(keep_last)], dry_run=dry_run)
    if as_json:
        print_json({"deleted": gone, "kept": dict(kept)})
        return
    rows: list[list[Any]] = [[name, "would go" if dry_run else "deleted"] for name in gone]
    rows += [[name, f"kept: {reason}"] for name, reason in sorted(kept.items())]
    print_table(["STEP", "WHAT"], rows) if rows else print("no step was committed here")
