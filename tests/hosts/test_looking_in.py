"""Looking into a run whose ranks are on other hosts: progress, stacks, hangs."""

import os
import signal

import pytest
from console import Console, until
from hosts.fleet import SCRIPTS, Fleet

from argosy.supervise import read_incidents

pytest.importorskip("cryptography")
pytestmark = pytest.mark.system


def training(fleet: Fleet, seconds: float = 0.2, steps: int = 1000) -> list[str]:
    return ["-n", "1", str(SCRIPTS / "train.py"), str(fleet.directory), str(steps), str(seconds)]


def test_steps_and_stacks_of_ranks_on_other_hosts(console: Console):
    fleet = Fleet(console, "seen", 2)
    fleet.start(*training(fleet))
    fleet.wait_for("did step 3;")
    until(lambda: min(rank["steps"] for rank in console.ps("seen")["ranks"]) >= 3, "steps of both ranks")
    shown = console.argosy("stacks", "seen")
    assert shown.code == 0, shown.text
    assert "train.py" in shown.text
    assert "not alive" not in shown.text
    stopped = fleet.ranks_of("host1")[0]
    os.kill(stopped, signal.SIGSTOP)
    until(lambda: console.ps("seen")["ranks"][1]["state"] == "stopped", "a stopped rank on host1")
    os.kill(stopped, signal.SIGCONT)
    assert console.argosy("stop", "seen").code == 0


def test_a_rank_that_hangs_is_named_with_its_host(console: Console):
    fleet = Fleet(console, "hangs", 2)
    command = fleet.start("--hang-after", "10", "-n", "1", str(SCRIPTS / "beats.py"))
    fleet.wait_for("did step 5;")
    stopped = fleet.ranks_of("host1")[0]
    os.kill(stopped, signal.SIGSTOP)
    try:
        fleet.wait_for("rank 1 is stopped (SIGSTOP)")
        seen = [(incident.kind, incident.host) for incident in read_incidents(fleet.directory)]
        assert ("hang", "host1") in seen
        assert "rank 1 is stopped (SIGSTOP)" in console.argosy("why", "hangs").text
    finally:
        os.kill(stopped, signal.SIGCONT)
    steps = fleet.text.count("did step")
    until(lambda: fleet.text.count("did step") > steps + 3, "training that goes on")
    assert fleet.ranks_of("host1") == [stopped]
    assert console.argosy("stop", "hangs").code == 0
    fleet.end(command)
