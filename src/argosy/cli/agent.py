"""`argosy agent`: make this machine a host of a run that another machine heads."""

import os
import sys
from pathlib import Path

import click

from argosy.core import ConfigError


@click.command(short_help="Make this machine a host of a run that another one heads.")
@click.option("--join", is_flag=True, help="Join the run whose credentials come on standard input, as one line.")
@click.option("--runtime", type=click.Path(file_okay=False), help="Directory for sockets. Default: one in /tmp.")
@click.option("--tied", is_flag=True, help="End when standard input ends.")
def command(join: bool, runtime: str | None, tied: bool) -> None:
    """Serve a run as one of its hosts, until its head or SIGTERM ends that.

    `argosy run --on ENGINE` starts this on each host, and passes the credentials to its standard input.
    """
    from argosy.cli.accelerators import list_accelerators
    from argosy.hosts import check_host
    from argosy.supervise import clear_dead_hosts, decode_membership, refuse_to_serve, serve_as_host

    if not join:
        raise ConfigError("`argosy agent` needs --join", hint="commands start the agent of this machine by themselves")
    membership = decode_membership(_first_line())
    credentials = membership.credentials
    place = Path(runtime) if runtime else Path(f"/tmp/argosy-{os.getuid()}", f"{credentials.run}.{credentials.name}")
    clear_dead_hosts(place.parent)
    if reason := check_host(membership.needs, place, len(list_accelerators(os.environ))):
        refuse_to_serve(membership, reason)
        raise ConfigError(f"this host is not used: {reason}")
    sys.exit(serve_as_host(membership, place, tied=tied))


def _first_line() -> bytes:
    """One line of standard input; what follows it stays there for the next reader."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    return line
