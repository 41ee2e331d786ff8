"""`argosy logs`: what the ranks of a running or ended run wrote."""

import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from argosy.cli.tables import print_json
from argosy.core import ConfigError, parse_ranks

if TYPE_CHECKING:
    from argosy.supervise import Out, Stream


class LogFile(NamedTuple):
    """The output of one process of a rank."""

    generation: int
    rank: int
    stream: "Stream"
    path: Path


@click.command(short_help="Show what ranks wrote.")
@click.argument("run", default="last")
@click.option("-f", "--follow", is_flag=True, help="Keep showing what the ranks write, until the run ends.")
@click.option("--rank", "ranks", metavar="0-3,7", help="Only these ranks.")
@click.option("--stream", type=click.Choice(["stdout", "stderr"]), help="Only this stream.")
@click.option("--launch", type=click.IntRange(1), help="An earlier launch of the run.")
@click.option("--json", "as_json", is_flag=True, help="The files, machine-readable.")
def command(run: str, follow: bool, ranks: str | None, stream: str | None, launch: int | None, as_json: bool) -> None:
    """Show the output of RUN's ranks as one stream; lines that several ranks wrote are shown once."""
    from argosy.supervise import find_run, logs_directory, read_record

    directory = find_run(run)
    record = read_record(directory)
    folder = logs_directory(directory, launch or record.launch)
    chosen = parse_ranks(ranks, record.size) if ranks else range(record.size)

    def find() -> list[LogFile]:
        return [file for file in log_files(folder) if file.rank in chosen and stream in (None, file.stream)]

    if as_json:
        print_json([file._asdict() | {"path": str(file.path)} for file in find()])
    elif find() or follow:
        show(directory, record.size, find, follow)
    elif record.state == "running" and launch in (None, record.launch):
        print("nothing was written yet", file=sys.stderr)
    else:
        raise ConfigError(f"the run has written nothing, or it was removed: {folder}")


def log_files(folder: Path) -> list[LogFile]:
    """What there is, older generations first."""
    found: list[LogFile] = []
    streams: dict[str, Stream] = {"out": "stdout", "err": "stderr"}
    for path in folder.glob("*.*.*"):
        match path.name.split("."):
            case [rank, generation, ending] if rank.isdecimal() and generation.isdecimal() and ending in streams:
                found.append(LogFile(int(generation), int(rank), streams[ending], path))
            case _:
                pass
    return sorted(found)


def show(directory: Path, size: int, find: Callable[[], list[LogFile]], follow: bool) -> None:
    """Print the files, generation by generation; then what comes."""
    from argosy.supervise import Follower, list_runs

    follower, shown = Follower(size, lag_max=None), set[Path]()
    colour = sys.stdout.isatty()

    def write(outs: "Iterable[Out]") -> None:
        for out in outs:
            target = sys.stdout if out.stream == "stdout" else sys.stderr
            target.buffer.write(follower.render(out, colour))
            target.flush()

    while True:
        alive = follow and any(run.directory == str(directory) for run in list_runs(everywhere=True).runs)
        files = [file for file in find() if file.path not in shown]
        for generation in sorted({file.generation for file in files}):
            for file in [file for file in files if file.generation == generation]:
                shown.add(file.path)
                follower.add(file.rank, file.stream, str(file.path))
            write(follower.outs(final=True))
        if not alive:
            break
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            write(follower.outs())
            time.sleep(follower.idle_s())
    write(follower.rest())
