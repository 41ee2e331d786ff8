"""Trainings whose ranks are killed end with the bits, samples and rows of one that nobody disturbed."""

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from console import PATIENCE_S, Console, terminal, until
from voyages import LONG, SCRIPT, Landed, check, haunt, sail


@pytest.fixture(scope="module")
def dock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    """One terminal for all voyages: the zygote stays warm."""
    with terminal(tmp_path_factory.mktemp("dock")) as console:
        yield console


@pytest.mark.parametrize(
    "deaths",
    [
        ["1.0:constructor", "1.1:meet", "1.2:reduce:1", "1.3:after vote:4", "1.4:evaluation:5"],
        ["0.0:forward:0", "0.1:snapshot", "0.2:before vote:5", "0.3:after vote:8"],
        ["1.0:forward:3", "1.1:rehearsal", "1.2:heal"],
        ["0.0:reduce:6", "1.0:reduce:6"],
    ],
    ids=lambda deaths: " ".join(deaths),
)
def test_replicas_under_every_kind_of_death(dock: Console, deaths: list[str]):
    check(dock, "plain", 2, *deaths)


@pytest.mark.system
def test_a_row_is_not_lost_with_two_who_should_have_written_it(dock: Console):
    check(dock, "plain", 3, "0.0:after vote:4", "2.0:healed:5")


@pytest.mark.system
def test_of_ranks_that_are_lost_together_all_are_named(dock: Console):
    hard = check(dock, "plain", 3, "1.0:reduce:4", "2.0:reduce:4")
    assert hard.text.count("; ranks 1-2 replaced; resumed step 4 after") == 1, hard.text


def test_scaler_schedule_average_and_batchnorm(dock: Console):
    check(dock, "messy", 3, "1.0:forward:1", "2.0:after vote:3", "0.0:before vote:5", "2.1:forward:7")


def test_two_optimizers(dock: Console):
    check(dock, "gan", 2, "0.0:before vote:1", "1.0:after vote:4")


@pytest.mark.parametrize(
    "deaths",
    [["1.0:heal", "1.1:before vote:0", "0.0:after vote:3"], ["0.0:forward:5", "1.0:forward:5"]],
    ids=" ".join,
)
def test_shards(dock: Console, deaths: list[str]):
    check(dock, "sharded", 2, *deaths)


@pytest.mark.system
def test_shards_within_pairs_and_replicas_between_them(dock: Console):
    check(dock, "hybrid", 4, "3.0:forward:2", "0.0:after vote:5")


@pytest.mark.system
def test_a_frozen_model_with_adapters_and_a_scaler_that_is_off(dock: Console):
    check(dock, "adapted", 2, "1.0:before vote:2", "0.0:after vote:5")


@pytest.mark.system
def test_a_compiled_model(dock: Console):
    check(dock, "compiled", 2, "1.0:forward:2", "0.0:after vote:5")


@pytest.mark.system
def test_shards_with_tensor_parallelism(dock: Console):
    check(dock, "grid", 4, "2.0:before vote:4", "1.0:after vote:6")


@pytest.mark.system
def test_stages_of_a_pipeline(dock: Console):
    check(dock, "staged", 2, "0.0:before vote:0", "1.0:forward:2", "0.1:after vote:5")


@pytest.mark.system
def test_a_rank_that_never_computed_a_step_is_as_ready_as_the_replacement_of_the_lost_one(dock: Console):
    """A schedule's first step exchanges more than the others: the replacement did that in its rehearsal."""
    check(dock, "staged", 2, "0.0:constructor")


@pytest.mark.system
def test_experts_spread_over_ranks(dock: Console):
    check(dock, "experts", 2, "1.0:forward:2", "0.0:after vote:5")


def test_who_has_taken_the_state_over_has_it(dock: Console):
    """While rank 0's replacement takes the state over, rank 1, which had it, dies too."""
    hard = check(dock, "plain", 2, "0.0:forward:6", "0.1:adopted>1")
    assert "resumed from step" not in hard.text, "from a checkpoint"


SOAKED = [("plain", 2), ("plain", 4), ("messy", 3), ("gan", 2), ("sharded", 2), ("experts", 2), ("staged", 2)]


@pytest.mark.soak
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("seed", range(int(os.environ.get("ARGOSY_SOAK_FROM", "0")), 40))
def test_random_deaths(dock: Console, seed: int, tmp_path: Path):
    """At least 25 in each, so more than 1,000 in all."""
    kind, ranks = SOAKED[seed % len(SOAKED)]
    calm = sail(dock, kind, ranks, steps=LONG)
    directory, out = dock.cwd / f"haunted-{seed}", tmp_path / "out"
    directory.mkdir()
    words = ["run", "-n", str(ranks), SCRIPT, str(directory), kind, str(LONG)]
    command = dock.start(*words, out=out)
    until(lambda: len(list(directory.glob("built.*"))) == ranks, "all ranks")
    kills, zeroth = haunt(directory, lambda: command.poll() is not None, random.Random(seed))
    assert command.wait(PATIENCE_S) == 0, out.read_text()[-8000:]
    hard = Landed(directory, out.read_text())
    print(f"{kind} on {ranks}: {kills} killed, {zeroth} of them rank 0")
    assert kills
    assert hard.digests == calm.digests
    assert [step for step, _ in hard.rows] == list(range(1, LONG + 1))
    differ = [step for (step, values), (_, wanted) in zip(hard.rows, calm.rows, strict=True) if values != wanted]
    # What rank 0 had no time to say is said by another rank, of its own samples.
    assert len(differ) <= 2 * zeroth, differ
    for number, lines in calm.samples.items():
        assert set(hard.samples.get(number, lines)) <= set(lines)
    shutil.rmtree(directory)
