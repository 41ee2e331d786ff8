"""A host is checked before ranks are placed on it; one that fails, or was lost before, is avoided."""

import pytest
from console import Console
from hosts.fleet import SCRIPTS, Fleet

from argosy.control import facts
from argosy.hosts.host_checks import MB, HostMeans, judge_host
from argosy.supervise import HostNeeds
from argosy.supervise.records.rundir import read_facts

ENOUGH = HostMeans(memory=1 << 34, shared_memory=1 << 33, disk=1 << 33, accelerators=8, directory=True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"memory": 100 * MB}, "it has 100 MB of memory available, and needs 512"),
        ({"shared_memory": 0}, "it has 0 MB of room in /dev/shm, and needs 64"),
        ({"accelerators": 3}, "it has 3 accelerators, and needs 4"),
        ({"directory": False}, "the run's directory is not shared with it: /runs/x"),
        ({}, ""),
    ],
)
def test_what_a_host_lacks_is_named(change: dict[str, int], reason: str):
    state = HostMeans(**{**{field: getattr(ENOUGH, field) for field in ENOUGH.__struct_fields__}, **change})
    assert judge_host(HostNeeds(ranks=4, accelerators=4, directory="/runs/x"), state) == reason


@pytest.mark.system
def test_a_host_that_fails_the_check_is_left_out_and_avoided_by_the_next_launch(console: Console):
    pytest.importorskip("cryptography")
    fleet = Fleet(console, "checked", 3)
    # The second host has the address that ends with 3.
    check = "if ip -4 -o addr show eth0 | grep -q '\\.3/'; then echo too hot; exit 4; fi"
    assert fleet.end(fleet.start("--hosts", "2", "--check", check, "-n", "1", str(SCRIPTS / "sums.py"))) == 0
    assert "too hot" in fleet.text
    places = sorted(line.split("place ")[1] for line in fleet.text.splitlines() if "place " in line)
    assert places == ["0 0 0 2 1 2 sum 3", "1 0 1 2 1 2 sum 3"], fleet.text
    lost = [fact for fact in read_facts(fleet.directory) if isinstance(fact, facts.HostLost)]
    assert [(fact.host, fact.ranks, fact.spare) for fact in lost] == [("host1", [], "host2")]
    words = ["--hosts", "2", "-n", "1", "--", "sh", "-c", "echo on $ARGOSY_HOST"]
    assert fleet.end(fleet.start(*words)) == 0, fleet.text
    assert "host host1 was lost before" in fleet.text
    assert {line.split("on ")[1] for line in fleet.text.splitlines() if "] " in line} == {"host0", "host2"}


@pytest.mark.system
def test_an_excluded_host_is_not_used_and_a_failed_check_without_a_spare_ends_the_run(console: Console):
    pytest.importorskip("cryptography")
    fleet = Fleet(console, "excluded", 2)
    assert fleet.end(fleet.start("--exclude", "host0", "-n", "1", "--", "sh", "-c", "echo on $ARGOSY_HOST")) == 0
    assert "on host1" in fleet.text
    assert "on host0" not in fleet.text
    assert fleet.end(fleet.start("--check", "exit 5", "-n", "1", "--", "true")) == 1
    assert "its check failed (5)" in fleet.text
