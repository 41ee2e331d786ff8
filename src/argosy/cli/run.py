"""`argosy run`: torchrun's flags and more."""

import os
import sys
from typing import Any

import click
from click.core import ParameterSource

from argosy.cli.torchrun_flags import UnderscoreCommand, ignored_flags, say_ignored
from argosy.core import ConfigError

OF_TORCHRUN = frozenset(
    (
        *("ranks", "hosts", "engine", "mesh", "nnodes", "node_rank", "standalone"),
        *("master_addr", "master_port", "role", "virtual_local_rank"),
    )
)
"""Flags that ask for ranks: without any of them the script runs as under `python script.py`."""


@click.command(
    cls=UnderscoreCommand,
    context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False},
    short_help="Run a script, module or program as ranks.",
)
@click.option(
    "-n",
    "--ranks",
    "--nproc-per-node",
    "ranks",
    metavar="N",
    help="Ranks; `gpu`: one per GPU; `cpu`: one per core; `auto`: either. Default: one process, as python runs it.",
)
@click.option(
    "--spare-gpus", type=click.IntRange(0), default=0, help="With -n gpu: GPUs kept free, for one that fails."
)
@click.option("--hosts", type=click.IntRange(1), help="Hosts; -n counts the ranks of each. Needs --on.")
@click.option("--on", "engine", metavar="ENGINE", help="Where hosts come from: slurm, ray, local:K, ssh:HOST,HOST.")
@click.option("--spares", type=click.IntRange(0), default=0, help="Hosts to keep for the place of one that is lost.")
@click.option("--exclude", metavar="HOST,HOST", help="Hosts of the engine that are not used.")
@click.option("--check", metavar="COMMAND", default="", help="A shell command that must succeed on each host.")
@click.option("--dry-run", is_flag=True, help="With --on slurm: print the batch script, and submit nothing.")
@click.option("--mesh", metavar="dp=2,tp=2", help="Ranks as a grid with named dimensions, instead of -n.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as for python -m.")
@click.option("--no-python", is_flag=True, help="SCRIPT is a program, not Python; the same as `-- PROGRAM`.")
@click.option("-d", "--detach", is_flag=True, help="Run in the background, and return at once.")
@click.option("--name", help="Name of the run. Default: script and time.")
@click.option("--dir", "directory", type=click.Path(file_okay=False), help="Directory of the run. Default: runs/NAME.")
@click.option("--restart", metavar="rank|group:DIM|all|never", help="Which ranks to restart when one fails.")
@click.option("--max-restarts", type=click.IntRange(0), help="How often to restart; implies --restart all.")
@click.option(
    "--grace",
    "--shutdown-timeout",
    "grace",
    default=30.0,
    show_default=True,
    help="Seconds between SIGTERM and SIGKILL.",
)
@click.option("--hang-after", default=30.0, show_default=True, help="Seconds of silence before a hang is reported.")
@click.option("--hang-timeout", type=float, help="Treat a rank that hangs as failed after so many seconds.")
@click.option("--threads", metavar="N|auto", help="Threads of torch per rank; auto: an equal share of the cores.")
@click.option(
    "--secret", "secrets", multiple=True, metavar="NAME[=FILE]", help="A variable whose value is never written to disk."
)
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON per event; output goes to files only.")
@click.option("--nnodes", default="1", help="Nodes, on each of which this command is started with its --node-rank.")
@click.option("--node-rank", type=int, help="Which of the --nnodes this is. Node 0 heads the run.")
@click.option("--standalone", is_flag=True, hidden=True)
@click.option("--master-addr", default="127.0.0.1", hidden=True)
@click.option(
    "--master-port",
    type=click.IntRange(0, 65535),
    default=0,
    help="Port of torch's store. Default: a free one.",
)
@click.option("-t", "--tee", default="0", hidden=True)
@click.option(
    "-r", "--redirects", default="0", help="Streams for files only: 1 (stdout), 2 (stderr), 3, or per rank: 0:3,1:1."
)
@click.option("--log-dir", type=click.Path(file_okay=False), help="Directory for the output of the ranks.")
@click.option("--local-ranks-filter", metavar="0,2-3", help="Show the output of these ranks only.")
@click.option("--role", default="default", hidden=True)
@click.option("--run-path", is_flag=True, hidden=True)
@click.option("--virtual-local-rank", is_flag=True, hidden=True)
@ignored_flags
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(ctx: click.Context, script: str, args: tuple[str, ...], **options: Any) -> None:
    """Run SCRIPT with ARGS on this machine, as one process or as many ranks.

    \b
      argosy run train.py                     one process, as python train.py
      argosy run -n 4 train.py --lr 1e-3      four ranks, as torchrun --nproc-per-node 4
      argosy run -n 4 -m package.train        a module
      argosy run -n 4 -- ./program --flag     any program
    """
    from argosy.cli.allocation import GRACE_S, notice_allocation, wants_job
    from argosy.cli.launch_builder import Options, choose_directory, start
    from argosy.cli.nodes import count_nodes, find_node_rank, head_engine, serve_node, shared_name

    several = options["nnodes"] != "1"
    if not options["standalone"] and not several:
        options["engine"] = notice_allocation(options["engine"], os.environ)
    given = {name for name in options if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    fields = {name: value for name, value in options.items() if name in Options.__struct_fields__}
    chosen = Options(**fields, alone=not given & OF_TORCHRUN and options["engine"] is None)
    # torchrun's --run-path overrides its --no-python.
    program = (chosen.no_python and not options["run_path"]) or ctx.meta.get("argosy.program", False)
    used = {"rdzv_id", "rdzv_endpoint"} if several else set[str]()
    for line in say_ignored({name for name, value in options.items() if value is not None} - used):
        print(f"argosy: {line}", file=sys.stderr)
    if (count := count_nodes(options["nnodes"])) > 1:
        chosen.name = chosen.name or (None if chosen.directory else shared_name(options["rdzv_id"], os.environ))
        if chosen.name is None and chosen.directory is None:
            raise ConfigError(
                "--nnodes needs --dir or --rdzv-id, the same on all nodes, on a file system that they share"
            )
        directory, _ = choose_directory(chosen, script)
        rank = find_node_rank(options["node_rank"], count, os.environ)
        if rank:
            sys.exit(serve_node(rank, directory))
        chosen.master_port, chosen.hosts, chosen.alone = 0, count, False
        chosen.engine = head_engine(count, chosen.master_addr, options["rdzv_endpoint"], directory)
    if wants_job(chosen.engine, os.environ):
        from argosy.cli.job import run_as_job

        sys.exit(run_as_job(chosen, script, sys.argv[2:], len(args) + 1, dry=options["dry_run"]))
    if options["dry_run"]:
        raise ConfigError("--dry-run shows what would be submitted: it needs --on slurm, outside an allocation")
    if chosen.engine == "slurm" and "grace" not in given:
        chosen.grace = GRACE_S
    sys.exit(start(chosen, script, list(args), program))
