"""The invariants of simulated runs find bugs in the machines that ship, and nothing where there is no bug."""

from pathlib import Path

import pytest
from sim.planted_bugs import BUGS, PlantedBug, first_violation, plant

SEEDS = 1000

pytestmark = pytest.mark.system


@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_a_planted_bug_is_found(bug: PlantedBug, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    found = first_violation(plant(bug, tmp_path), bug.seeds)
    assert found.startswith("seed ")
    with capsys.disabled():
        print(f"\n{bug.name}: {found[:100]}")


def test_nothing_is_found_without_one(tmp_path: Path):
    assert first_violation(plant(None, tmp_path), SEEDS) == ""
