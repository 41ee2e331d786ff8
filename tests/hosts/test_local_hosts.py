"""Runs over virtual hosts, each with a network of its own: started, watched, lost, cut off, ended."""

import os
import re
import signal

import pytest
from console import Console, ask_agent, until
from hosts.fleet import SCRIPTS, Fleet

from argosy.cli.clean_find import look_at_run
from argosy.control import facts
from argosy.supervise.records.rundir import read_facts, read_record

pytest.importorskip("cryptography")
pytestmark = pytest.mark.system
STEPS = 30


def digests(text: str) -> set[str]:
    return set(re.findall(r"digest ([0-9a-f]{64})", text))


_undisturbed: set[str] = set()


def undisturbed(console: Console) -> set[str]:
    """What the training ends with on one host."""
    if not _undisturbed:
        training = [str(SCRIPTS / "train.py"), "runs/calm", str(STEPS), "0"]
        ended = console.argosy("run", "-n", "2", "--dir", "runs/calm", *training)
        assert ended.code == 0, ended.text
        _undisturbed.update(digests(ended.text))
    return _undisturbed


def train(fleet: Fleet, seconds: float = 0.2) -> list[str]:
    return ["--hosts", "2", "-n", "1", str(SCRIPTS / "train.py"), str(fleet.directory), str(STEPS), str(seconds)]


def test_an_unmodified_script_has_its_place_and_its_group_over_two_hosts(console: Console):
    fleet = Fleet(console, "sums", 2)
    assert fleet.end(fleet.start("-n", "2", str(SCRIPTS / "sums.py"))) == 0, fleet.text
    places = sorted(line.split("place ")[1] for line in fleet.text.splitlines() if "place " in line)
    assert places == [
        "0 0 0 4 2 2 sum 10",
        "1 1 0 4 2 2 sum 10",
        "2 0 1 4 2 2 sum 10",
        "3 1 1 4 2 2 sum 10",
    ], fleet.text


def test_the_first_failure_is_named_with_its_host_and_code(console: Console):
    fleet = Fleet(console, "fails", 2)
    script = "test $RANK = 1 && exit 7; sleep 1000"
    assert fleet.end(fleet.start("-n", "1", "--", "sh", "-c", script)) == 7, fleet.text
    assert "rank 1 failed: exit code 7 on host1" in console.argosy("why", str(fleet.directory)).text


def test_ps_logs_and_stop_reach_all_hosts(console: Console):
    fleet = Fleet(console, "stops", 3)
    words = fleet.words("-d", "--hosts", "2", "-n", "1", "--", "sh", "-c", "echo here is $ARGOSY_HOST; exec sleep 1000")
    assert console.argosy(*words).code == 0
    assert console.pid("stops", 0) in fleet.pids("host0")
    assert console.pid("stops", 1) in fleet.pids("host1")
    assert [rank["host"] for rank in console.ps("stops")["ranks"]] == ["host0", "host1"]
    logs = until(lambda: text if (text := console.argosy("logs", "stops").text).count("here is") == 2 else "", "logs")
    assert "here is host0" in logs
    assert "here is host1" in logs
    assert console.argosy("stop", "stops").code == 0
    until(lambda: read_record(fleet.directory).state == "ended", "the end of the run")
    fleet.check_nothing_is_left()


def test_the_ranks_of_a_killed_host_continue_on_the_spare_one_with_the_same_weights(console: Console):
    fleet = Fleet(console, "killed", 3)
    command = fleet.start(*train(fleet))
    fleet.wait_for("did step 5;")
    survivor = fleet.ranks_of("host0")
    fleet.kill("host1")
    fleet.wait_for("did step 20;")
    assert survivor == fleet.ranks_of("host0")
    assert fleet.end(command) == 0, fleet.text
    assert digests(fleet.text) == undisturbed(console), fleet.text
    lost = [fact for fact in read_facts(fleet.directory) if isinstance(fact, facts.HostLost)]
    assert [(fact.host, fact.ranks, fact.spare) for fact in lost] == [("host1", [1], "host2")]
    assert "host host1 lost" in console.argosy("why", str(fleet.directory)).text
    assert (fleet.directory / "hosts/host0/metrics/1/spans").exists()
    assert look_at_run(fleet.directory).strangers == 0, "a file that argosy clean does not know"


def test_without_a_spare_host_the_run_ends_when_one_is_lost(console: Console):
    fleet = Fleet(console, "alone", 2)
    command = fleet.start("-n", "1", "--", "sleep", "1000")
    until(lambda: fleet.directory.exists() and len(fleet.ranks_of("host1")) == 1, "a rank on host1")
    fleet.kill("host1")
    assert fleet.end(command) == 1, fleet.text
    assert "no spare host" in fleet.text


def test_ranks_train_on_while_the_head_is_replaced(cold_console: Console):
    console = cold_console
    fleet = Fleet(console, "headless", 2)
    command = fleet.start(*train(fleet))
    fleet.wait_for("did step 3;")
    ranks = [fleet.ranks_of(host) for host in ("host0", "host1")]
    known = ask_agent(console)
    assert known is not None
    os.kill(next(daemon.pid for daemon in known.daemons if daemon.what == "agent"), signal.SIGKILL)
    fleet.wait_for("did step 20;")
    assert [fleet.ranks_of(host) for host in ("host0", "host1")] == ranks
    assert fleet.end(command) == 0, fleet.text
    assert digests(fleet.text) == undisturbed(console), fleet.text


def test_a_host_that_was_cut_off_learns_that_it_was_replaced(console: Console):
    fleet = Fleet(console, "cut", 3)
    command = fleet.start(*train(fleet))
    fleet.wait_for("did step 5;")
    outdated = fleet.ranks_of("host1")
    fleet.plug("host1", connected=False)
    until(lambda: fleet.ranks_of("host2"), "a rank on the spare host")
    fleet.plug("host1", connected=True)
    until(lambda: not fleet.ranks_of("host1"), "the end of the ranks that were replaced")
    assert outdated
    assert fleet.end(command) == 0, fleet.text
    assert digests(fleet.text) == undisturbed(console), fleet.text
