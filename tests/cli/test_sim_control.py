"""`argosy sim control`: what it prints, and what it refuses."""

import json

import pytest
from click.testing import CliRunner, Result

from argosy.cli.sim_control import command
from argosy.core import ConfigError


def sim_control(*words: str) -> Result:
    return CliRunner().invoke(command, [*words])


def test_it_says_what_happened_to_the_hosts():
    said = sim_control("--hosts", "2000", "--hours", "24", "--spares", "8", "--seed", "1").output
    assert said.startswith("2,000 hosts, 2,000 ranks, 24 simulated hours in ")
    assert "end: exit code 0: every rank ended with exit code 0" in said
    assert "every invariant held" in said


def test_a_program_gets_the_same_result_of_the_same_seed():
    one, two = (
        json.loads(sim_control("--hosts", "500", "--hours", "48", "--seed", "3", "--json").output) for _ in range(2)
    )
    assert one["took_s"] > 0
    assert one["result"] == two["result"]
    assert (one["result"]["hosts"], one["result"]["code"]) == (500, 0)


def test_harsh_lives_several_small_worlds():
    assert sim_control("--faults", "harsh", "--seeds", "5").output.startswith("5 worlds, ")
    said = json.loads(sim_control("--faults", "harsh", "--seed", "7", "--seeds", "3", "--json").output)
    assert (said["seeds"], said["violation"]) == (3, None)


def test_a_world_is_replayed_event_for_event():
    one, two = (sim_control("--faults", "harsh", "--seed", "4", "--replay").output for _ in range(2))
    assert one == two
    assert "    0.000  host0    Launched(" in one
    assert "digest " in one.splitlines()[-2]


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--hosts", "0"), "not a run: 0 hosts"),
        (("--hosts", "3", "--ranks", "0"), "hosts of 0 ranks"),
        (("--hosts", "3", "--spares", "-1"), "-1 spare hosts"),
        (("--hosts", "3", "--hours", "nan"), "nan hours"),
        (("--hosts", "3", "--hours", "inf"), "inf hours"),
        (("--hosts", "3", "--restart", "group:x"), "groups of ranks are not simulated on many hosts: group:x"),
        (("--hosts", "3", "--restart", "sometimes"), "sometimes"),
        (("--faults", "harsh", "--seeds", "0"), "--seeds 0: at least one seed is needed"),
        (("--hosts", "3", "--seeds", "2"), "--replay and --seeds are not for llama3"),
        (("--hosts", "3", "--replay"), "--replay and --seeds are not for llama3"),
    ],
)
def test_numbers_that_describe_no_run_are_refused(words: tuple[str, ...], what: str):
    error = sim_control(*words).exception
    assert isinstance(error, ConfigError)
    assert what in str(error)
