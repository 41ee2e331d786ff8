"""Ranks that are lost when the loop of steps is over, and ranks that come to it late."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from console import Console, Ended, terminal

SCRIPT = str(Path(__file__).parent / "scripts" / "over.py")
STEPS = 5


@pytest.fixture(scope="module")
def dock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    with terminal(tmp_path_factory.mktemp("dock")) as console:
        yield console


def launch(dock: Console, *parts: str, ranks: int = 2) -> Ended:
    return dock.argosy("run", "-n", str(ranks), SCRIPT, f"runs/{ranks}-{'-'.join(parts)}", str(STEPS), *parts)


def weights(ended: Ended) -> dict[str, tuple[str, str]]:
    """By rank and generation: its step, and the sum of its weights."""
    assert ended.code == 0, ended.text
    found = re.findall(r"rank (\d+\.\d+) step (\d+) weights (\S+)", ended.text)
    return {rank: (step, total) for rank, step, total in found}


@pytest.mark.parametrize("parts", [[], ["stop"]])
def test_a_rank_that_is_replaced_after_the_loop_has_the_last_state(dock: Console, parts: list[str]):
    found = weights(launch(dock, *parts))
    assert found.keys() == {"0.0", "1.1"}
    assert found["1.1"] == found["0.0"]
    assert found["0.0"][0] == ("4" if parts else str(STEPS))


def test_shards_after_the_loop_are_those_of_its_end(dock: Console):
    lost = weights(launch(dock, "fsdp"))
    again = weights(launch(dock, "fsdp"))  # The same run, which is over: rank 1 is killed again.
    assert again == lost
    assert lost["1.1"] != lost["0.0"]
    assert lost["1.1"][0] == str(STEPS)


def test_an_exchange_after_the_loop_has_everybody_s_values(dock: Console):
    ended = launch(dock, "sum")
    assert len({*weights(ended).values()}) == 1, ended.text
    assert set(re.findall(r"sum (\d+)", ended.text)) == {"3"}, ended.text


@pytest.mark.system
def test_an_exchange_with_a_rank_that_ended_is_refused(dock: Console):
    """Rank 0 has all that it wanted when rank 1 dies."""
    ended = launch(dock, "early", "sum")
    assert ended.code == 1, ended.text
    assert "a rank that ended with the loop of steps is lost" in ended.text
    assert set(re.findall(r"sum (\d+)", ended.text)) == {"3"}, ended.text


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_that_comes_late_is_met_in_the_next_view(dock: Console, ranks: int):
    found = weights(launch(dock, "late", ranks=ranks))
    assert found.keys() == {f"{rank}.0" for rank in range(ranks)}
    assert len({*found.values()}) == 1
