"""`argosy trace`: profile ranks of a running run."""

import time
from pathlib import Path

import click

from argosy.cli.tables import print_json
from argosy.core import format_ranks, parse_ranks


@click.command(short_help="Profile ranks of a running run into one file for Perfetto.")
@click.argument("run", default="last")
@click.option("--steps", type=click.IntRange(1, 1000), default=3, show_default=True, help="How many steps.")
@click.option("--rank", "ranks", metavar="0-3,7", help="Only these ranks.")
@click.option("--wait", "wait_s", type=float, default=120.0, show_default=True, metavar="SECONDS", help="How long.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The file; by default in the run's directory.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def command(run: str, steps: int, ranks: str | None, wait_s: float, output: Path | None, as_json: bool) -> None:
    """Let torch.profiler watch the next steps of RUN's ranks, and write one trace of all of them.

    The script does not change and is not restarted; its steps are slower while they are watched. Open the file in
    Perfetto, or read it with `argosy report FILE`.
    """
    from argosy.fabric import runtime_dir, shared_memory_path
    from argosy.insight import trace_ranks
    from argosy.observe import metrics_directory
    from argosy.supervise import find_living

    living = find_living(run)
    chosen = parse_ranks(ranks, living.size) if ranks else list(range(living.size))
    target = output or Path(living.directory) / f"trace-{time.strftime('%Y%m%d-%H%M%S')}.json"
    metrics = metrics_directory(living.directory, int(living.run.rpartition("-")[2]))
    found = trace_ranks(shared_memory_path(runtime_dir()) / living.run, metrics, chosen, steps, wait_s, target)
    if as_json:
        print_json(found)
        return
    for rank, reason in found.missing.items():
        print(f"rank {rank}: {reason}")
    print(f"rank{'s' * (len(found.ranks) > 1)} {format_ranks(found.ranks)}, {steps} steps")
    print(found.path)
