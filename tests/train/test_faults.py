"""Trainings that once ended with wrong numbers, in silence, after a rank was killed."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from console import Console, Ended, cold_terminal, terminal

SCRIPT = str(Path(__file__).parent / "scripts" / "program.py")
STEPS = 8


@pytest.fixture(scope="module")
def dock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    with terminal(tmp_path_factory.mktemp("dock")) as console:
        yield console


def start(console: Console, ranks: int, parts: str, *deaths: str) -> Ended:
    name = "-".join([parts, str(ranks), *deaths]).replace(" ", "").replace(":", ".").replace(",", "_")
    return console.argosy("run", "-n", str(ranks), "--name", name, SCRIPT, f"runs/{name}", str(STEPS), parts, *deaths)


def digests(ended: Ended) -> list[str]:
    return line_of(ended, "digests").split()


def line_of(ended: Ended, word: str) -> str:
    """What a line says after the word."""
    assert ended.code == 0, ended.text
    return next(line for line in ended.text.splitlines() if word in line).split(word)[1]


def check(console: Console, ranks: int, parts: str, *deaths: str) -> str:
    """The run with deaths ends as the one without; returns what it said."""
    hard = start(console, ranks, parts, *deaths)
    assert digests(hard) == digests(start(console, ranks, parts))
    return hard.text


@pytest.mark.parametrize("parts", ["ddp,late5", "ddp,background5"])
def test_a_collective_after_the_vote_changes_nothing_if_it_fails(dock: Console, parts: str):
    text = check(dock, 2, parts, "1.0:after vote:4")
    # On a slow machine the rank dies before it has handed over its part of the first checkpoint.
    back = "a rank was lost in a step that had changed state already: all ranks went back to step 4"
    assert back in text or "there is no checkpoint yet: starting over" in text


def test_a_message_after_the_vote_is_never_answered_locally(dock: Console):
    check(dock, 2, "ddp,messages5", "0.0:after vote:4")


@pytest.mark.system
def test_shards_of_a_step_that_communicates_late_go_back_to_the_arenas(dock: Console):
    text = check(dock, 2, "fsdp,late5", "1.0:after vote:4")
    assert "resumed from step" not in text, "from a checkpoint"


@pytest.mark.parametrize("parts", ["fsdp,equal", "ddp,expert"])
def test_what_begins_equal_is_no_replica(dock: Console, parts: str):
    check(dock, 2, parts, "1.0:forward:3", "0.0:after vote:5")


def test_a_parameter_of_which_nothing_is_known_is_refused(dock: Console):
    refused = start(dock, 2, "ddp,expert,undeclared")
    assert refused.code == 1
    assert "nothing says whether all ranks have the same model.expert.weight, or each its own" in refused.text
    assert "own=[...] if each rank trains its own" in refused.text


def test_each_rank_resumes_with_its_own_parameters(dock: Console):
    calm = start(dock, 2, "ddp,expert")
    for steps in ("4", str(STEPS)):
        again = dock.argosy("run", "-n", "2", SCRIPT, "runs/again", steps, "ddp,expert")
    assert digests(again) == digests(calm)


def test_shards_of_two_attempts_are_never_combined(dock: Console):
    """Rank 0 has step 5, rank 1 has not. While step 4 is done again, rank 0 dies with the old shard in its arena."""
    ended = start(dock, 2, "fsdp,stamp", "1.0:after vote:4", "0.0:redone after vote:4")
    assert len(line_of(ended, "stamps").split()) == 1


def test_a_value_that_is_made_once_is_the_same_after_going_back(dock: Console):
    ended = start(dock, 2, "fsdp,once,random", "1.0:after vote:4")
    assert ended.code == 0, ended.text
    attempts = [line for path in dock.cwd.glob("runs/*random*/once.0") for line in path.read_text().splitlines()]
    assert sorted(attempts).count(next(each for each in attempts if each.startswith("4 "))) == 2
    assert len({each.split()[0] for each in attempts}) == len(set(attempts)) == STEPS


@pytest.mark.parametrize("parts", ["ddp,two,nan5", "ddp,critic1,nan5", "ddp,critic5,nan5", "plain,critic1,nan5"])
def test_gradients_of_a_second_optimizer_that_are_not_finite_skip_the_step(dock: Console, parts: str):
    ended = start(dock, 1 if "plain" in parts else 2, parts)
    assert ended.code == 0, ended.text
    assert "skipped step 4: a gradient or loss is not finite" in ended.text


@pytest.mark.system
def test_a_second_ddp_module_that_is_used_now_and_then(dock: Console):
    check(dock, 2, "ddp,critic2", "0.0:critic:1", "1.0:forward:6")


@pytest.mark.parametrize(("ranks", "parts"), [(3, "ddp,apart"), (2, "fsdp,apart")])
def test_a_vote_in_doubt_ends_the_same_way_everywhere(dock: Console, ranks: int, parts: str):
    """Gloo carries the vote. Rank 0 does not hear its outcome, the last rank dies with it, others have applied it."""
    hard = start(dock, ranks, parts, "0.0:doubt:3", f"{ranks - 1}.0:after vote:3")
    assert digests(hard) == digests(start(dock, ranks, parts))


SMALL = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=16m none /dev/shm && exec "$@"', "sh"]


@pytest.mark.system
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small /dev/shm needs root")
def test_a_small_shared_memory_is_enough(dock: Console, tmp_path: Path):
    """Two versions of two shards do not fit."""
    parts, deaths = "fsdp,wide", ["1.0:forward:2", "0.0:after vote:4", "1.1:before vote:5", "0.1:forward:6"]
    with cold_terminal(tmp_path) as console:
        words = [console.python, "-m", "argosy", "run", "-n", "2", SCRIPT, "runs/small", str(STEPS), parts, *deaths]
        small = console.run([*SMALL, *words])
    assert digests(small) == digests(start(dock, 2, parts))
    assert small.text.count("/dev/shm/") == small.text.count(" has no space") > 0, small.text


@pytest.mark.parametrize(
    ("parts", "death"),
    [
        ("ddp,ema", "1.0:after vote:2"),  # The count of an average is no buffer of this rank's own.
        (
            "ddp,sgd,scaler,ema,nan2",
            "1.0:end:5",
        ),  # The scaler skips the update, so the average changes before the vote.
    ],
)
def test_an_average_is_updated_once_a_step(dock: Console, parts: str, death: str):
    check(dock, 2, parts, death)
