"""Hosts that the system's OpenSSH reaches: keys, users and jump hosts are those of the user's configuration."""

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from argosy.core import ConfigError
from argosy.hosts.engines import HostProcess, route_to, start_process

ALIVE_S = 5
OPTIONS = ("-o", "BatchMode=yes", "-o", f"ServerAliveInterval={ALIVE_S}", "-o", "ServerAliveCountMax=3", "-T")


class SshEngine:
    """A list of hosts."""

    def __init__(self, names: list[str]) -> None:
        if any(not name or name.startswith("-") or "/" in name for name in names) or len(set(names)) < len(names):
            raise ConfigError(f"ssh needs a list of different hosts: {','.join(names)!r}")
        self.names = names

    def open(self) -> str:
        if shutil.which("ssh") is None:
            raise ConfigError("there is no ssh on this machine")
        return _route_to(self.names[0])

    def start(self, name: str, words: Sequence[str], ticket: bytes) -> HostProcess:
        return start_process(self._command(name, words), ticket)

    def _command(self, name: str, words: Sequence[str]) -> list[str]:
        return ["ssh", *OPTIONS, name, "exec " + shlex.join(words)]

    def options(self, runtime: Path, name: str) -> list[str]:
        return []

    def reason(self, name: str, code: int) -> str:
        return f"its ssh ended ({code})"

    def close(self) -> None:
        pass


def _route_to(name: str) -> str:
    """The address of this machine from which a host is reached; its real name is known to ssh alone."""
    asked = subprocess.run(["ssh", "-G", name], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    words = [line.split(" ", 1) for line in asked.stdout.splitlines()]
    target = next((value for key, *rest in words if key == "hostname" for value in rest), name)
    return route_to(target)
