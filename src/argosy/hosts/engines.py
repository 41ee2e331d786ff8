"""The engines that give hosts, behind one interface.

An engine names its hosts, executes a command on one of them, and knows what to undo in the end. What it returns for
the command ends when that does: its exit is the engine's word.
"""

import re
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from argosy.core import ConfigError

HOSTS_MAX = 1024


class HostProcess(Protocol):
    """What runs on a host, with the methods of `subprocess.Popen`."""

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float) -> int: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


class HostEngine(Protocol):
    """Where hosts come from."""

    @property
    def names(self) -> list[str]:
        """The hosts, in the order in which they are used."""
        ...

    def open(self) -> str:
        """Make the hosts reachable; returns the address under which they reach this machine.

        Raises:
            ConfigError: they cannot be had.
        """
        ...

    def start(self, name: str, words: Sequence[str], ticket: bytes) -> HostProcess:
        """Execute `words` on a host, with `ticket` as a line of standard input."""
        ...

    def options(self, runtime: Path, name: str) -> list[str]:
        """What `argosy agent` has to be told there; `runtime` is the head's runtime directory."""
        ...

    def reason(self, name: str, code: int) -> str:
        """Why the command on a host ended with this code, as the engine knows it."""
        ...

    def close(self) -> None:
        """Undo what `open` did. Everything on the hosts has ended."""
        ...


def find_engine(text: str, run: str) -> HostEngine:
    """The engine that `--on` names, for one run: `local:K`, `ssh:HOST,HOST` or, within an allocation, `slurm`.

    Raises:
        ConfigError: there is none of this name.
    """
    from argosy.hosts.by_hand import PREFIX, NodesEngine
    from argosy.hosts.local import LocalEngine
    from argosy.hosts.ray_cluster import RayEngine
    from argosy.hosts.slurm import SlurmEngine
    from argosy.hosts.ssh import SshEngine

    kind, _, rest = text.partition(":")
    if kind == "local" and re.fullmatch(r"[1-9]\d{0,3}", rest) and int(rest) <= HOSTS_MAX:
        return LocalEngine(int(rest), run)
    if kind == "ssh" and rest:
        return SshEngine([name.strip() for name in rest.split(",")])
    if kind == "ray":
        return RayEngine(rest)
    if kind == PREFIX:
        return NodesEngine(rest)
    if kind == "slurm":
        return SlurmEngine()
    raise ConfigError(f"--on must look like slurm, ray, local:3 or ssh:node1,node2: {text!r}")


def start_process(argv: Sequence[str], ticket: bytes) -> "subprocess.Popen[bytes]":
    """Start a command of this machine that executes something on a host; its standard input stays open."""
    child = subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True)
    assert child.stdin is not None
    with suppress(OSError):  # Its exit is seen.
        child.stdin.write(ticket + b"\n")
        child.stdin.flush()
    return child


def route_to(target: str) -> str:
    """The address of this machine from which another one is reached.

    Raises:
        ConfigError: nobody knows the other one.
    """
    try:
        family, kind, _, _, place = socket.getaddrinfo(target, 22, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # Sends nothing: the kernel chooses the route.
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"the host cannot be found: {target}: {error.strerror}") from None
