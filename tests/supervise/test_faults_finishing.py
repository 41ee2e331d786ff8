"""A run ends once, with its exit code, also if the agent is killed while it finishes."""

import os
import select
import signal
import time
from pathlib import Path

import pytest
from console import PATIENCE_S, Console, said, until
from daemons import daemon, gone, ranks, run_of

from argosy.control import facts
from argosy.supervise.records.rundir import read_facts, read_record

LEAVES = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(f"left {child.pid}", flush=True)
while not os.path.exists("go"):
    time.sleep(0.001)
os._exit(int(sys.argv[1]))
"""
"""A rank that leaves a child in its process group: finishing waits for the child for a moment, then kills it."""


def wait_for_end(pidfd: int) -> None:
    """Return at the very moment at which the process ends."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    assert poller.poll(60_000)
    os.close(pidfd)


@pytest.mark.parametrize("delay_s", [0.03, 0.5])
@pytest.mark.parametrize("code", [0, 7])
def test_a_run_whose_agent_is_killed_while_it_finishes_ends_once(
    host: Console, tmp_path: Path, delay_s: float, code: int
):
    (tmp_path / "leaves.py").write_text(LEAVES)
    out = tmp_path / "out"
    client = host.start("run", "--name", "ends", "leaves.py", str(code), out=out)
    child = int(said(out, r"left (\d+)")[1])
    rank, agent = ranks(host, "ends", count=1)[0].pid, daemon(host, "agent")
    pidfd = os.pidfd_open(rank)
    (tmp_path / "go").touch()
    wait_for_end(pidfd)
    time.sleep(delay_s)
    os.kill(agent, signal.SIGKILL)
    assert client.wait(PATIENCE_S) == code
    until(lambda: run_of(host, "ends") is None, "the end of the run")
    until(lambda: gone(child), "the end of the child")
    directory = tmp_path / "runs/ends"
    assert (read_record(directory).state, read_record(directory).code) == ("ended", code)
    ends = [fact.code for fact in read_facts(directory) if isinstance(fact, facts.LaunchEnded)]
    assert ends == [code]
    if code:
        assert "rank 0 failed: exit code 7" in host.argosy("why", "ends").text
