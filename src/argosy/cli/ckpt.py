"""`argosy ckpt`: list, check and compare checkpoints, and convert them from and to other formats."""

import shlex
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
    """The directory or URL that holds the checkpoints, also by the name of its run."""
    from argosy.supervise import find_run

    path = Path(text)
    if "://" in text:
        return text
    if path.exists():
        return _checked(path, text)
    if "/" in text:
        raise ConfigError(f"no such directory: {text}", hint="give a run's directory, or a name of `argosy ps --all`")
    return str(find_run(text))


def _checked(path: Path, text: str) -> str:
    """Refuse a file, a single step, or a checkpoint of another format, and say what to give instead."""
    from argosy.checkpoint import foreign_kind

    if (path / "root.json").is_file():
        raise ConfigError(f"this is one step, not a run: {text}", hint=f"give {path.absolute().parents[1]}, and --step")
    if (kind := foreign_kind(path)) is not None:
        what = f"this is a checkpoint of another format: {text}" if path.is_dir() else f"not a directory: {text}"
        raise ConfigError(what, hint=f"argosy ckpt import {kind} {shlex.quote(text)} RUN")
    return text


_place = click.argument("directory", metavar="RUN", callback=find_place)
_step = click.option("--step", type=int, help="Default: the newest step.")


@click.group(short_help="List, verify, compare and convert checkpoints.")
def command() -> None:
    """List, verify, compare and convert the checkpoints of a run: its directory, its URL, or its name."""


def some(names: Sequence[str]) -> str:
    """The first five, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def once(steps: "Sequence[StepInfo]") -> "list[StepInfo]":
    """Each step once: if it was saved again, as with a tag, the newer one."""
    newest: dict[tuple[int, int, str], StepInfo] = {}
    for each in sorted(steps, key=lambda each: each.saved_at):
        newest[each.era, each.step, each.fault] = each
    return [each for each in steps if newest[each.era, each.step, each.fault] is each or each.tags]


def print_none(directory: str) -> None:
    """Say that there is no step, and where else steps may be."""
    from argosy.checkpoint import ELSEWHERE

    print(f"no step was committed in {directory}\n  hint: {ELSEWHERE}")


@command.command()
@_place
@_json
def ls(directory: str, as_json: bool) -> None:
    """List the checkpoints, newest first."""
    from argosy.checkpoint import list_steps
    from argosy.cli.clean_plan import format_bytes

    steps = list_steps(directory)
    if as_json:
        print_json(steps)
        return
    if not steps:
        print_none(directory)
        return
    rows: list[list[str]] = []
    for each in once(steps):
        notes = [f"tag {tag}" for tag in each.tags] + ["pinned"] * each.pinned + [each.fault] * bool(each.fault)
        notes += [f"{name} {value:g}" for name, value in each.metrics.items()]
        saved = ago(each.saved_at) if each.saved_at else "?"
        rows.append([str(each.step), saved, format_bytes(each.bytes), str(each.ranks), ", ".join(notes)])
    print_table(["STEP", "SAVED", "SIZE", "RANKS", "NOTES"], rows, right=[0, 2, 3])


@command.command()
@_place
@_step
@_json
def show(directory: str, step: int | None, as_json: bool) -> None:
    """Show the tensors of a step with their digests, and its plain values."""
    from argosy.checkpoint import in_a_line, list_steps, opened, plain_values, tensors
    from argosy.cli.clean_plan import format_bytes

    chosen = opened(directory, step)
    newest = list_steps(directory)[0].step
    if step is None and newest != chosen.root.step:
        print(f"argosy: step {newest} cannot be opened; see `argosy ckpt verify`", file=sys.stderr)
    found, values = list(tensors(chosen).values()), plain_values(chosen)
    if as_json:
        print_json({"step": chosen.root.step, "tensors": found, "values": values})
        return
    print(f"step {chosen.root.step:,}")
    rows = [
        [t.name, t.role, t.dtype, "x".join(map(str, t.shape)) or "-", format_bytes(t.bytes), t.digest[:12]]
        for t in found
    ]
    if rows:
        print_table(["NAME", "ROLE", "DTYPE", "SHAPE", "SIZE", "DIGEST"], rows, right=[4])
    if values:
        print("\n" * bool(rows), end="")
        print_table(["NAME", "VALUE"], [[name, in_a_line(value)] for name, value in values.items()])


@command.command()
@_place
@click.option("--step", type=int, help="Default: all steps.")
@_json
def verify(directory: str, step: int | None, as_json: bool) -> None:
    """Read every byte and check it against its digest; exits 1 if anything is damaged."""
    from argosy.checkpoint import list_steps
    from argosy.checkpoint import verify as check
    from argosy.cli.clean_plan import count, format_bytes

    total = sum(each.bytes for each in list_steps(directory) if step in (None, each.step))
    faults: list[str] = []
    with click.progressbar(length=total, label="verifying", file=sys.stderr) as bar:
        faults += check(directory, step, bar.update)
    if as_json:
        print_json({"bytes": bar.pos, "faults": faults})
    else:
        print("\n".join([*faults, f"{format_bytes(bar.pos)} read, {count(len(faults), 'fault')}"]))
    sys.exit(1 if faults else 0)


@command.command()
@_place
@click.argument("first", type=int)
@click.argument("second", type=int)
@_json
def diff(directory: str, first: int, second: int, as_json: bool) -> None:
    """List the tensors that differ between two steps, and by how much."""
    from argosy.checkpoint import diff as compare

    found = compare(directory, first, second)
    if as_json:
        print_json(found)
        return

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.3g}"

    rows = [[each.name, each.kind, number(each.max_abs), number(each.relative)] for each in found]
    print_table(["NAME", "CHANGE", "LARGEST", "RELATIVE"], rows, right=[2, 3]) if rows else print("no tensor differs")


@command.command()
@_place
@click.argument("kind", type=click.Choice(["hf", "dcp", "torch"]))
@click.argument("target", type=click.Path(path_type=Path))
@_step
@click.option("--module", help="Which of several modules: hf holds one.")
@_json
def export(directory: str, kind: str, target: Path, step: int | None, module: str | None, as_json: bool) -> None:
    """Write a step in another format: Hugging Face safetensors, DCP, or torch.save."""
    from argosy.checkpoint import export as write
    from argosy.cli.clean_plan import count, format_bytes

    found = write(directory, kind, target, step, module=module)
    total = len({id(tensor) for tensor in found.tensors.values()})
    if as_json:
        said = {"tensors": total, "bytes": found.bytes, "left_out": found.unused, "passed_over": found.skipped}
        print_json({"step": found.step, "source": found.source, "target": str(target), **said})
        return
    source = f" from {found.source}" if "keeper" in found.source else ""
    size = f"{count(total, 'tensor')}, {format_bytes(found.bytes)}"
    print(f"step {found.step:,}{source} written to {target} ({size}, verified)")
    for reason in found.skipped:
        print(f"skipped {reason}")
    if found.unused:
        print(f"not exported ({kind} holds only weights): {some(found.unused)}")


@command.command(name="import")
@click.argument("kind", type=click.Choice(["hf", "dcp", "torch"]))
@click.argument("source", type=click.Path(path_type=Path, exists=True))
@click.argument("directory")
@click.option("--step", type=int, help="The step that it becomes. Default: 0.")
@_json
def import_(kind: str, source: Path, directory: str, step: int | None, as_json: bool) -> None:
    """Make a checkpoint from files of another format."""
    from argosy.checkpoint import import_ as read
    from argosy.cli.clean_plan import count

    total = read(kind, source, directory, step)
    if as_json:
        print_json({"step": step or 0, "directory": directory, "tensors": total})
        return
    print(f"{count(total, 'tensor') if total else 'only plain values'} committed as step {step or 0} of {directory}")


@command.command()
@_place
@click.option("--keep-last", type=int, help="Keep this many of the newest steps.")
@click.option(
    "--keep-best",
    metavar="METRIC:COUNT[:highest]",
    multiple=True,
    help="Also keep the steps with the lowest (or highest) values of a metric.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be deleted, and delete nothing.")
@_json
def prune(directory: str, keep_last: int | None, keep_best: tuple[str, ...], dry_run: bool, as_json: bool) -> None:
    """Delete old steps. Tagged and pinned steps stay, and the files that a kept step refers to.

    The rules of the run's own Saver are not known here: give them again, as with --keep-best.
    """
    from argosy.checkpoint import KeepLast, list_steps, prune_steps

    best = [_keep_best(text) for text in keep_best]
    known = {name for step in list_steps(directory) for name in step.metrics} if best else set[str]()
    for each in best:
        if each.metric not in known:
            there = ", ".join(sorted(known))
            raise ConfigError(f"no step has the metric {each.metric!r}", hint=f"there is {there or 'none'}")
    if keep_last is None and not best:
        raise ConfigError("say what to keep", hint="--keep-last 3, or --keep-best val:2; --dry-run only shows")
    last = [] if keep_last is None else [KeepLast(keep_last)]
    gone, kept = prune_steps(directory, [*last, *best], dry_run=dry_run)
    if as_json:
        print_json({"deleted": gone, "kept": dict(kept)})
        return
    rows: list[list[Any]] = [[name, "would be deleted" if dry_run else "deleted"] for name in gone]
    rows += [[name, f"kept: {reason}"] for name, reason in sorted(kept.items())]
    print_table(["STEP", "RESULT"], rows) if rows else print_none(directory)


def _keep_best(text: str) -> Any:
    """`val:2` or `accuracy:2:highest`; names of metrics may hold colons."""
    from argosy.checkpoint import KeepBest

    short = text.removesuffix(":highest")
    metric, _, count = short.rpartition(":")
    if not metric or not count.isdigit():
        raise ConfigError(f"not METRIC:COUNT or METRIC:COUNT:highest: {text}", hint="--keep-best val:2")
    return KeepBest(metric, int(count), highest=short != text)
