"""`argosy exec`: run a command in the environment of a rank."""

import os
import shutil
import subprocess
import sys

import click

from argosy.cli.tables import print_json
from argosy.core import ConfigError


@click.command(
    short_help="Run a command in a rank's environment.",
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
)
@click.option("--rank", type=click.IntRange(0), default=0, show_default=True, help="The rank.")
@click.option("--run", "run", default="last", show_default=True, help="The run.")
@click.option("--json", "as_json", is_flag=True, help="Exit code and output, machine-readable.")
@click.argument("argv", nargs=-1, required=True, type=click.UNPROCESSED)
def command(rank: int, run: str, as_json: bool, argv: tuple[str, ...]) -> None:
    """Run a command in the directory of a running rank, with its variables (RANK, MASTER_PORT, secrets, ...).

    \b
      argosy exec --rank 3 -- python -c 'import os; print(os.environ["MASTER_PORT"])'
    """
    from argosy.supervise import Environment, GetEnvironment, Refused, find_living, open_environment, reach_agent

    living = find_living(run)
    if any(each.index == rank and each.host for each in living.ranks):
        sys.exit(execute_elsewhere(living.run, rank, argv, as_json=as_json))
    link = reach_agent()
    link.send(GetEnvironment(living.run, rank))
    answer, fds = link.wait(30.0)
    if isinstance(answer, Refused):
        raise ConfigError(answer.reason, hint=answer.hint)
    assert isinstance(answer, Environment)
    sealed = open_environment(fds[0])
    variables = {**answer.defaults, **sealed.variables, **sealed.secrets, **answer.variables}
    if shutil.which(argv[0], path=variables.get("PATH")) is None:
        raise ConfigError(f"no such program: {argv[0]}")
    os.chdir(answer.cwd)
    if not as_json:
        os.execvpe(argv[0], argv, variables)
    ended = subprocess.run(argv, env=variables, stdin=subprocess.DEVNULL, capture_output=True)
    output = {"stdout": ended.stdout.decode(errors="replace"), "stderr": ended.stderr.decode(errors="replace")}
    print_json({"rank": rank, "argv": argv, "code": ended.returncode, **output})
    sys.exit(ended.returncode if ended.returncode >= 0 else 128 - ended.returncode)


def execute_elsewhere(run: str, rank: int, argv: tuple[str, ...], *, as_json: bool) -> int:
    """The same on the host of a rank; returns the exit code."""
    from argosy.cli.tunnel import put_out, run_tunnel
    from argosy.supervise import OpenTunnel

    pieces: dict[int, list[bytes]] = {1: [], 2: []}

    def collect(stream: int, data: bytes) -> None:
        pieces[stream].append(data)

    code = run_tunnel(OpenTunnel(run, rank, list(argv)), collect if as_json else put_out, stdin=not as_json)
    if as_json:
        out, err = (b"".join(pieces[stream]).decode(errors="replace") for stream in (1, 2))
        print_json({"rank": rank, "argv": argv, "code": code, "stdout": out, "stderr": err})
    return code
