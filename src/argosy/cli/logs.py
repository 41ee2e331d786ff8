"""`argosy logs`: what ranks wrote, of a living or an ended run."""

import sys
import time
from pathlib import Path

import click

from argosy.core import ConfigError, parse_ranks


@click.command(short_help="Show what ranks wrote.")
@click.argument("run", default="last")
@click.option("-f", "--follow", is_flag=True, help="Go on as the ranks write, until the run ends.")
@click.option("--rank", "ranks", metavar="0-3,7", help="Only these ranks.")
@click.option("--stream", type=click.Choice(["stdout", "stderr"]), help="Only this stream.")
@click.option("--launch", type=click.IntRange(1), help="An earlier launch of the run.")
@click.option("--json", "as_json", is_flag=True, help="The files, machine-readable.")
def command(run: str, follow: bool, ranks: str | None, stream: str | None, launch: int | None, as_json: bool) -> None:
    """Show the output of RUN's ranks as one stream; equal lines of several ranks are shown once."""
    from argosy.process import find_run, read_record

    directory = find_run(run)
    record = read_record(directory)
    folder = logs_of(directory, launch or record.launch)
    files = log_files(folder, parse_ranks(ranks, record.size) if ranks else None, stream)
    if as_json:
        from argosy.cli.tables import print_json

        print_json([{"rank": rank, "generation": gen, "stream": kind, "path": str(p)} for rank, gen, kind, p in files])
        return
    if not files and not follow:
        if record.state == "running" and launch in (None, record.launch):
            print("nothing was written yet", file=sys.stderr)
            return
        raise ConfigError(f"no output was kept: {folder}")
    show(directory, folder, files, record.size, follow, ranks, stream)


def logs_of(directory: Path, launch: int) -> Path:
    """The directory of a launch's output, wherever `--log-dir` put it."""
    from argosy.process import logs_directory

    return logs_directory(directory, launch)


def log_files(folder: Path, ranks: list[int] | None, stream: str | None) -> list[tuple[int, int, str, Path]]:
    """(rank, generation, stream, path) of what there is, in that order."""
    found: list[tuple[int, int, str, Path]] = []
    for path in folder.glob("*.*.*"):
        parts = path.name.split(".")
        kind = {"out": "stdout", "err": "stderr"}.get(parts[2]) if len(parts) == 3 else None
        if kind is None or not (parts[0].isdecimal() and parts[1].isdecimal()):
            continue
        if (ranks is None or int(parts[0]) in ranks) and stream in (None, kind):
            found.append((int(parts[0]), int(parts[1]), kind, path))
    return sorted(found, key=lambda entry: (entry[1], entry[0], entry[2]))


def show(
    directory: Path,
    folder: Path,
    files: list[tuple[int, int, str, Path]],
    size: int,
    follow: bool,
    *selection: str | None,
) -> None:
    """Print the files, generation by generation; then what comes."""
    from argosy.process import Merger, Tail, list_runs

    ranks, stream = selection
    merger, colour = Merger(size, prefix=size > 1), sys.stdout.isatty()
    tail = Tail(lag_max=None)
    shown: set[Path] = set()

    def pour() -> bool:
        chunks, now = tail.poll(), time.monotonic()
        merger.feed_all(chunks, now)
        for out in merger.due(now):
            target = sys.stdout if out.stream == "stdout" else sys.stderr
            target.buffer.write(merger.render(out, colour))
            target.flush()
        return bool(chunks)

    chosen = parse_ranks(ranks, size) if ranks else None
    while True:
        for generation in sorted({entry[1] for entry in files}):
            for rank, _, kind, path in [entry for entry in files if entry[1] == generation and entry[3] not in shown]:
                shown.add(path)
                stream_of = "stdout" if kind == "stdout" else "stderr"
                tail.add(rank, stream_of, str(path))
                merger.feed(rank, stream_of, b"", time.monotonic())  # It has like lines to say: they are waited for.
            while pour():
                pass
        alive = follow and any(run.directory == str(directory) for run in list_runs(everywhere=True).runs)
        if not alive:
            break
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            pour()
            time.sleep(tail.idle_s())
        files = log_files(folder, chosen, stream)
    while pour():
        pass
    for rank in range(size):
        merger.close(rank, time.monotonic())
    for out in merger.due(time.monotonic() + 60):
        target = sys.stdout if out.stream == "stdout" else sys.stderr
        target.buffer.write(merger.render(out, colour))
        target.flush()
