"""Looking into a run whose ranks are on other hosts: progress, stacks, hangs."""

import json
import os
import signal

import pytest
from console import Console, until
from hosts.fleet import SCRIPTS, Fleet

from argosy.insight import open_run
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


def test_exec_runs_on_the_host_of_the_rank_with_its_variables(console: Console):
    fleet = Fleet(console, "execs", 2)
    command = fleet.start("-n", "1", "--", "sleep", "1000")
    until(lambda: [rank["state"] for rank in console.ps("execs").get("ranks", [])] == ["running"] * 2, "two ranks")
    words = ["exec", "--run", "execs", "--rank", "1", "--"]
    script = "echo $RANK $ARGOSY_HOST; readlink /proc/self/ns/net; cat; exit 3"
    shown = console.argosy(*words, "sh", "-c", script, stdin=b"in")
    assert shown.code == 3, shown.text
    network = os.readlink(f"/proc/{fleet.ranks_of('host1')[0]}/ns/net")
    assert shown.out.decode() == f"1 host1\n{network}\nin"
    # Many times what a pipe holds, both ways.
    many = os.urandom(3_000_000)
    assert console.argosy(*words, "cat", stdin=many).out == many
    assert "no-such-program" in console.argosy(*words, "no-such-program").text
    told = json.loads(console.argosy("exec", "--json", *words[1:], "sh", "-c", "echo out; echo err >&2").out)
    assert (told["code"], told["stdout"], told["stderr"]) == (0, "out\n", "err\n")
    assert console.argosy("stop", "execs").code == 0
    fleet.end(command)


def test_a_breakpoint_on_another_host_is_reached_by_debug(console: Console):
    fleet = Fleet(console, "breaks", 2)
    script = console.cwd / "breaks.py"
    script.write_text(
        "import os\nseen = 'here' + os.environ['RANK']\nbreakpoint()\nprint('went on', seen, flush=True)\n"
    )
    command = fleet.start("-n", "1", str(script))
    until(lambda: console.ps("breaks"), "the run")
    shown = console.argosy("debug", "breaks", "--rank", "1", "--wait", "200", stdin=b"p seen\ncontinue\n")
    assert "here1" in shown.text, shown.text
    assert console.argosy("debug", "breaks", "--rank", "0", "--wait", "200", stdin=b"continue\n").code == 0
    assert fleet.end(command) == 0, fleet.text
    assert "went on here1" in fleet.text


def test_the_ledger_has_the_spans_of_all_hosts(console: Console):
    fleet = Fleet(console, "ledger", 2)
    assert fleet.end(fleet.start(*training(fleet, 0.05, 20))) == 0, fleet.text
    run = open_run(fleet.directory)
    recorded = run.data.launches[-1].processes
    assert {rank for rank, _ in recorded} == {0, 1}
    assert run.start_facts()["argv"][0] == "argosy"
    assert console.argosy("report", str(fleet.directory)).code == 0
    assert not list(fleet.directory.glob("hosts/*/clock.json")), "one machine has one clock"
