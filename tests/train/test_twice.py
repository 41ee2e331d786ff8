"""Runs that branch off, or do a step's work twice: computed again, saved again."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from console import Console, terminal

from argosy.checkpoint import list_steps
from argosy.train import read_log

SCRIPT = str(Path(__file__).parent / "scripts" / "branch.py")


@pytest.fixture(scope="module")
def dock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    with terminal(tmp_path_factory.mktemp("dock")) as console:
        yield console


def train(console: Console, directory: str, *words: str, ranks: int = 1) -> tuple[set[str], str]:
    """The digests of all ranks, and all that was said."""
    ended = console.argosy("run", "-n", str(ranks), SCRIPT, directory, *words)
    assert ended.code == 0, ended.text
    return set(re.findall(r"digest (\w+)", ended.text)), ended.text


@pytest.mark.system
def test_a_branch_begins_where_its_parent_was(dock: Console):
    whole, _ = train(dock, "whole", "20")
    train(dock, "parent", "10")
    branched, said = train(dock, "branch", "20", "parent=parent@10")
    assert branched == whole
    assert "resumed from step 10 (parent" in said
    assert [row.step for row in read_log(dock.cwd / "branch")] == list(range(11, 21))
    refused = dock.argosy("run", "-n", "1", SCRIPT, "other", "20", "parent=nowhere@3")
    assert refused.code != 0
    assert "no such run: nowhere" in refused.text


def test_a_step_saved_twice_holds_nobody_up(dock: Console):
    _, said = train(dock, "tagged", "11", "tag=10", ranks=2)
    assert "finished after step 11" in said
    assert (10, ["mine"]) in [(info.step, info.tags) for info in list_steps(dock.cwd / "tagged")]


@pytest.mark.system
def test_a_flipped_bit_is_found_and_its_rank_replaced(dock: Console):
    calm, _ = train(dock, "trusted", "12", "recheck=3", ranks=2)
    plain, _ = train(dock, "unchecked", "12", ranks=2)
    assert calm == plain
    found, said = train(dock, "distrusted", "12", "recheck=3", "flip=1:5", ranks=2)
    assert "rank 1 computed step 5 twice and got different gradients" in said
    assert "restarting rank 1 (generation 1)" in said
    assert found == calm
