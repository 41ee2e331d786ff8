"""Runs on virtual hosts of this machine, and what can happen to these."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from console import PATIENCE_S, Console, until

from argosy.hosts.local import LocalEngine, can_isolate, namespace_pids
from argosy.supervise.records.rundir import read_facts, run_id

SCRIPTS = Path(__file__).parent / "scripts"


class Fleet:
    """One run of `argosy run --on local:K`, and the hosts that it has."""

    def __init__(self, console: Console, name: str, count: int) -> None:
        if not can_isolate():
            pytest.skip("virtual hosts need root, ip and nsenter")
        self.console, self.name = console, name
        self.directory = console.cwd / "runs" / name
        self.out = console.cwd / f"{name}.out"
        self.engine = LocalEngine(count, run_id(self.directory, 1))
        self.count = count

    def words(self, *words: str) -> list[str]:
        return ["run", "--dir", str(self.directory), "--on", f"local:{self.count}", *words]

    def start(self, *words: str) -> "subprocess.Popen[bytes]":
        return self.console.start(*self.words(*words), out=self.out)

    @property
    def text(self) -> str:
        return self.out.read_text() if self.out.exists() else ""

    def wait_for(self, text: str) -> None:
        """Until the run has said this; if it ends before, what it said is shown."""
        until(lambda: text in self.text or "ended with exit code" in self.text, f"{text!r} from {self.name}")
        assert text in self.text, self.text

    def end(self, command: "subprocess.Popen[bytes]") -> int:
        code = command.wait(PATIENCE_S)
        self.check_nothing_is_left()
        return code

    def pids(self, host: str) -> list[int]:
        return namespace_pids(self.engine.namespace(host))

    def kill(self, host: str) -> None:
        """The host loses its power: all at once, so that nothing replaces anything; then until all are gone."""
        for number in (signal.SIGSTOP, signal.SIGSTOP, signal.SIGKILL):
            self._signal(host, number)

        def gone() -> bool:
            self._signal(host, signal.SIGKILL)
            return not self.pids(host)

        until(gone, f"the end of {host}")

    def _signal(self, host: str, number: int) -> None:
        for pid in self.pids(host):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def plug(self, host: str, *, connected: bool) -> None:
        """Pull the host's cable, or put it back."""
        port = f"{self.engine.bridge}.{self.engine.names.index(host)}"
        subprocess.run(["ip", "link", "set", port, "up" if connected else "down"], check=True)

    def ranks_of(self, host: str) -> list[int]:
        """The pids of the living ranks on a host."""
        started = [fact.pid for fact in read_facts(self.directory) if type(fact).__name__ == "RankStarted"]
        return [pid for pid in started if pid in self.pids(host)]

    def check_nothing_is_left(self) -> None:
        for name in self.engine.names:
            assert not os.path.exists(f"/run/netns/{self.engine.namespace(name)}"), name
            runtime = self.engine.options(self.console.runtime, name)[1]
            assert not os.path.exists(runtime), os.listdir(runtime)
        assert not os.path.exists(f"/sys/class/net/{self.engine.bridge}")
