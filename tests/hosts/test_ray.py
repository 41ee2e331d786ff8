"""Runs on a real Ray cluster of four raylets on this machine; one of them is killed."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from console import PATIENCE_S, Console, until
from hosts.fleet import SCRIPTS

from argosy.control import facts
from argosy.supervise.records.rundir import read_facts, read_record

pytest.importorskip("cryptography")
pytest.importorskip("ray", reason="pip install ray")
pytestmark = pytest.mark.engines
STEPS = 30


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a cluster."""
    env = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1"}
    words = [sys.executable, "-W", "ignore", str(SCRIPTS / "ray_nodes.py"), "4"]
    nodes = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env)
    with nodes:
        assert nodes.stdin is not None
        assert nodes.stdout is not None
        try:
            for line in nodes.stdout:
                if line.startswith(b"address "):
                    yield line.split()[1].decode()
                    break
            else:
                raise AssertionError("Ray did not start")
        finally:
            nodes.stdin.close()
            nodes.wait(60)


class OnRay:
    """One run."""

    def __init__(self, console: Console, address: str, name: str) -> None:
        self.console, self.directory = console, console.cwd / "runs" / name
        self.out = console.cwd / f"{name}.out"
        self._words = ["run", "--dir", str(self.directory), "--on", f"ray:{address}"]

    def start(self, *words: str) -> "subprocess.Popen[bytes]":
        return self.console.start(*self._words, *words, out=self.out)

    @property
    def text(self) -> str:
        return self.out.read_text() if self.out.exists() else ""

    def wait_for(self, text: str) -> None:
        until(lambda: text in self.text or "ended with exit code" in self.text, f"{text!r}")
        assert text in self.text, self.text

    def wardens(self) -> dict[str, psutil.Process]:
        """Those of the run's hosts, by the name of the host."""
        found: dict[str, psutil.Process] = {}
        for process in psutil.process_iter(["cmdline"]):
            title = " ".join(process.info["cmdline"] or ())
            if match := re.search(rf"argosy: warden .*/{self.run}\.(host\d+)", title):
                found[match[1]] = process
        return found

    @property
    def run(self) -> str:
        words = [path.name for path in Path(f"/tmp/argosy-{os.getuid()}").glob("*.host*")]
        mine = [word.partition(".")[0] for word in words if self._is_mine(word)]
        return mine[0] if mine else "none"

    def _is_mine(self, word: str) -> bool:
        from argosy.supervise.records.rundir import run_id

        return word.partition(".")[0] == run_id(self.directory, read_record(self.directory).launch)

    def check_nothing_is_left(self) -> None:
        until(lambda: not self.wardens(), "no daemon of the run's hosts")
        assert self.run == "none"


def digests(text: str) -> set[str]:
    return set(re.findall(r"digest ([0-9a-f]{64})", text))


def train(run: OnRay, seconds: float) -> list[str]:
    return ["-n", "1", str(SCRIPTS / "train.py"), str(run.directory), str(STEPS), str(seconds)]


def test_a_killed_raylet_is_a_lost_host_and_the_weights_are_those_of_one_host(console: Console, address: str):
    calm = console.argosy("run", "-n", "2", str(SCRIPTS / "train.py"), "runs/calm", str(STEPS), "0")
    assert calm.code == 0, calm.text
    run = OnRay(console, address, "on-ray")
    command = run.start("--hosts", "2", *train(run, 0.0))
    assert command.wait(PATIENCE_S) == 0, run.text
    assert digests(run.text) == digests(calm.text) != set()
    run.check_nothing_is_left()
    run = OnRay(console, address, "killed")
    go = console.cwd / "go"
    command = run.start("--hosts", "2", "--spares", "1", *train(run, 0.3), str(go))
    run.wait_for("did step 3;")
    agent = run.wardens()["host1"].parent()
    assert agent is not None
    worker = agent.parent()
    assert worker is not None
    raylet = worker.parent()
    assert raylet is not None
    assert "raylet" in raylet.name()
    os.kill(raylet.pid, signal.SIGKILL)
    until(lambda: any(isinstance(fact, facts.HostLost) for fact in read_facts(run.directory)), "a lost host")
    go.touch()
    assert command.wait(PATIENCE_S) == 0, run.text
    assert digests(run.text) == digests(calm.text), run.text
    lost = [fact for fact in read_facts(run.directory) if isinstance(fact, facts.HostLost)]
    assert [(fact.host, fact.ranks, fact.spare) for fact in lost] == [("host1", [1], "host2")]
    assert "host host1 lost" in console.argosy("why", str(run.directory)).text
    run.check_nothing_is_left()
