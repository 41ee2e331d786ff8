"""Make this machine a host of somebody else's run: start its daemons, and wait until they have ended."""

import contextlib
import os
import select
import shutil
import signal
import time
from pathlib import Path

from argosy.core import ArgosyError, ConfigError, DeadlinePassed
from argosy.fabric import make_runtime, shared_memory_path
from argosy.supervise.cgroup import remove_parent
from argosy.supervise.client.agent_client import end_daemons, reach_agent
from argosy.supervise.records.membership import Membership, write_membership
from argosy.supervise.records.owner import is_inhabited

END_S = 60.0
"""How long the head may take to end the run, and this host its part of it."""
YOUNG_S = 120.0
"""Daemons of a directory that is younger may be about to start."""
REFUSED_S = 10.0
TURN_S = 0.2
GONE_S = 3.0
"""Daemons that were killed are replaced by each other within this time."""


def serve_as_host(membership: Membership, runtime: Path, *, tied: bool = False) -> int:
    """Serve the run until its head dismisses this host, or until SIGTERM; returns an exit code.

    A host that is `tied` counts as lost when standard input ends, and ends.

    Raises:
        ConfigError: the runtime directory is in use.
        DeadlinePassed: the daemons do not come up, or do not end.
    """
    if is_inhabited(runtime):
        raise ConfigError(f"the runtime directory is in use: {runtime}")
    make_runtime(runtime)
    write_membership(runtime, membership)
    wanted: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: wanted.append(number))
    reach_agent(runtime=runtime).close()
    gone_since: float | None = None
    while not wanted:
        if is_inhabited(runtime):
            gone_since = None
        elif gone_since is None:
            gone_since = time.monotonic()
        elif not runtime.exists() or time.monotonic() - gone_since > GONE_S:
            return 0
        if select.select([0] if tied else [], [], [], TURN_S)[0] and not os.read(0, 4096):
            _shut_down(runtime, lost=True)
            return 1
    _shut_down(runtime)
    return 0


def refuse_to_serve(membership: Membership, reason: str) -> None:
    """Tell the head why this host cannot serve, and wait until it has heard that.

    Raises:
        PeerLost: the head cannot be reached.
    """
    from argosy.fabric import connect_secure  # TLS takes time to import.
    from argosy.supervise.agent.host_messages import HostHello, to_member

    link = connect_secure(membership.address, membership.credentials, to_member)
    try:
        link.send(HostHello(0, reason))
        deadline = time.monotonic() + REFUSED_S
        while not link.receive() and time.monotonic() < deadline:  # It is dismissed.
            select.select([link], [], [], TURN_S)
    finally:
        link.close()


def clear_host(runtime: Path) -> None:
    """Remove what daemons left that were killed together with all else on their host; living ones are not touched."""
    if runtime.exists() and not is_inhabited(runtime):
        remove_parent(runtime)
        for path in (shared_memory_path(runtime), runtime):
            shutil.rmtree(path, ignore_errors=True)


def clear_dead_hosts(home: Path) -> None:
    """Clear what daemons in directories below `home` left when their host, or its cgroup, was killed.

    They were hosts of runs that go on elsewhere: nobody else comes to clean up.
    """
    with contextlib.suppress(OSError):
        for note in home.glob("*/member.json"):
            if time.time() - note.stat().st_mtime > YOUNG_S:
                clear_host(note.parent)


def _shut_down(runtime: Path, *, lost: bool = False) -> None:
    """Let the daemons end everything on this host, and wait for that."""
    deadline = time.monotonic() + END_S
    while is_inhabited(runtime):
        if time.monotonic() > deadline:
            raise DeadlinePassed("the end of Argosy's daemons", END_S)
        with contextlib.suppress(ArgosyError):
            end_daemons("the engine that gave this host", END_S, runtime, lost=lost)
        time.sleep(0.02)
