"""`argosy debug`: look into a rank that has reached `breakpoint()`."""

import os
import select
import socket
import sys
import termios
import time
import tty
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import click

from argosy.cli.tables import print_json
from argosy.core import ConfigError, format_ranks

POLL_S = 0.2


@click.command(short_help="Use pdb in a rank that is at a breakpoint.")
@click.argument("run", default="last")
@click.option("--rank", type=click.IntRange(0), help="The rank; by default the one that is at a breakpoint.")
@click.option("--wait", "wait_s", type=float, default=0.0, metavar="SECONDS", help="Wait for a breakpoint so long.")
@click.option("--json", "as_json", is_flag=True, help="Only list the ranks that are at a breakpoint.")
def command(run: str, rank: int | None, wait_s: float, *, as_json: bool) -> None:
    """Connect to a rank of RUN that has called `breakpoint()`: pdb, as if it ran here.

    `continue` lets the rank go on, and so does closing this terminal; `quit` ends it. Meanwhile no other rank counts as
    hanging.
    """
    from argosy.fabric import runtime_dir
    from argosy.supervise import find_living

    living = find_living(run)
    if any(each.host for each in living.ranks):
        _debug_elsewhere(living.run, rank, time.monotonic() + wait_s, as_json=as_json)
        return
    folder = runtime_dir() / "runs" / living.run
    if as_json:
        print_json([{"rank": waiting} for waiting in sorted(waiting_ranks(folder))])
        return
    client = _connect(folder, rank, time.monotonic() + wait_s)
    with client, _raw_terminal():
        _relay(client)


def _debug_elsewhere(run: str, rank: int | None, deadline: float, *, as_json: bool) -> None:
    """The same for ranks on other hosts."""
    from argosy.cli.tunnel import put_out, run_tunnel
    from argosy.supervise import OpenTunnel

    if rank is None or as_json:
        raise ConfigError("the ranks of this run are on other hosts: choose one", hint="--rank 3")
    while True:
        try:
            with _raw_terminal():
                run_tunnel(OpenTunnel(run, rank, []), put_out)
            return
        except ConfigError:  # It is not there yet, or not alive.
            if time.monotonic() >= deadline:
                raise
        time.sleep(POLL_S)


def waiting_ranks(folder: Path) -> dict[int, Path]:
    """The sockets of ranks that wait at a breakpoint; of two processes of a rank, the newer one's."""
    found = sorted((int(path.name.split(".")[1]), path) for path in folder.glob("*.debug"))
    return {int(path.name.split(".")[0]): path for _, path in found}


def _connect(folder: Path, rank: int | None, deadline: float) -> socket.socket:
    while True:
        waiting = waiting_ranks(folder)
        chosen = min(waiting, default=None) if rank is None and len(waiting) < 2 else rank
        if chosen in waiting and (client := _reach(waiting[chosen])) is not None:
            return client
        if time.monotonic() >= deadline:
            break
        time.sleep(POLL_S)
    if rank is None and waiting:
        raise ConfigError(
            f"several ranks are at a breakpoint: {format_ranks(sorted(waiting))}", hint="choose one: --rank"
        )
    who = "no rank" if rank is None else f"rank {rank}"
    raise ConfigError(
        f"{who} is {'not ' if rank is not None else ''}at a breakpoint", hint="call breakpoint() there; --wait 60 waits"
    )


def _reach(path: Path) -> socket.socket | None:
    client = socket.socket(socket.AF_UNIX)
    folder = -1
    try:
        folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        client.connect(f"/proc/self/fd/{folder}/{path.name}")
    except OSError:  # It went on, or is just being reached by somebody else.
        client.close()
        return None
    finally:
        if folder >= 0:
            os.close(folder)
    return client


@contextmanager
def _raw_terminal() -> Generator[None]:
    """Pass every key on: the rank's own terminal edits lines."""
    if not os.isatty(0):
        yield
        return
    before = termios.tcgetattr(0)
    tty.setraw(0)
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


def _relay(client: socket.socket) -> None:
    """Copy both ways until the rank hangs up."""
    sources = [client.fileno(), 0]
    while True:
        ready = select.select(sources, [], [])[0]
        if client.fileno() in ready:
            data = client.recv(65536)
            if not data:
                return
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
        elif data := os.read(0, 65536):
            client.sendall(data)
        else:
            sources.remove(0)
            client.shutdown(socket.SHUT_WR)
