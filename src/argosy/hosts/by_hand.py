"""Nodes on each of which somebody starts the same `argosy run --nnodes N --node-rank K`, as under torchrun.

Node 0 heads the run. The others get their credentials by way of the run's directory (handover.py).
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from argosy.core import ConfigError
from argosy.hosts.engines import HostProcess, start_process

PREFIX = "nodes"


def engine_text(count: int, address: str, directory: Path) -> str:
    """How this engine is written down in a launch."""
    return f"{PREFIX}:{count}:{address}:{directory}"


class NodesEngine:
    """`count` nodes, of which this machine is the first."""

    def __init__(self, text: str) -> None:
        try:
            count, self._address, directory = text.split(":", 2)
            self.names = [f"node{number}" for number in range(int(count))]
        except ValueError:
            raise ConfigError(f"--on does not take nodes: {text!r}", hint="--nnodes 2 --node-rank 0") from None
        self._directory = Path(directory)

    def open(self) -> str:
        return self._address

    def start(self, name: str, words: Sequence[str], ticket: bytes) -> HostProcess:
        return start_process(self._command(name, words), ticket)

    def _command(self, name: str, words: Sequence[str]) -> list[str]:
        if name == self.names[0]:
            return list(words)
        return [sys.executable, "-m", "argosy.hosts.handover", str(self._directory), name]

    def options(self, runtime: Path, name: str) -> list[str]:
        return ["--runtime", str(runtime.with_name(f"{runtime.name}-{name}"))] if name == self.names[0] else []

    def reason(self, name: str, code: int) -> str:
        return f"{name} ended" if code == 0 else f"{name} did not come"

    def close(self) -> None:
        pass
