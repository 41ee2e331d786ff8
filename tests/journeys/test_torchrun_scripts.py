"""`torchrun` becomes `argosy run`, and nothing else changes: scripts that were written for torchrun."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from console import Console, terminal
from people import python_of_people

SCRIPTS = Path(__file__).with_name("scripts")
RUNS_OF_FRAMEWORKS = 10
TWO = ["--nproc-per-node", "2"]


@pytest.fixture
def scripts(tmp_path: Path) -> Iterator[Console]:
    """A terminal in a copy of the scripts' directory."""
    shutil.copytree(SCRIPTS, tmp_path / "scripts")
    with terminal(tmp_path / "scripts") as console:
        yield console


@pytest.fixture
def people(scripts: Console, tmp_path: Path) -> Console:
    scripts.python = python_of_people()
    scripts.env |= {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return scripts


def lines_of(out: bytes) -> set[str]:
    """What was said, whichever rank said it: the prefix differs, and equal lines of ranks are shown once."""
    lines = out.decode().splitlines()
    return {re.sub(r"^\[[\d,-]+\]", "", line).strip() for line in lines}


def results_of(out: bytes) -> list[str]:
    return sorted(line for line in lines_of(out) if line.startswith("RESULT"))


@pytest.mark.system
def test_a_small_script_trains_to_the_same_weights(scripts: Console) -> None:
    theirs = scripts.torchrun(*TWO, "nano.py")
    ours = scripts.argosy("run", *TWO, "nano.py")
    assert (theirs.code, ours.code) == (0, 0), theirs.text + ours.text
    assert len(results_of(theirs.out)) == 1
    assert results_of(ours.out) == results_of(theirs.out)


def test_a_script_that_exits_3_fails_with_3(scripts: Console) -> None:
    """torchrun turns every failure into 1; the code of the first rank that failed says more."""
    (scripts.cwd / "three.py").write_text(
        "import os, sys, time\nif os.environ['RANK'] == '1':\n    print('leaving'); sys.exit(3)\ntime.sleep(600)\n"
    )
    theirs = scripts.torchrun(*TWO, "three.py")
    ours = scripts.argosy("run", *TWO, "three.py")
    assert (theirs.code, ours.code) == (1, 3)
    assert "leaving" in lines_of(ours.out)
    assert "Traceback" not in ours.text


@pytest.mark.system
@pytest.mark.timeout(900)
@pytest.mark.parametrize("script", ["boring.py", "trainer.py"])
def test_frameworks_reach_the_same_loss(people: Console, script: str) -> None:
    theirs = people.torchrun(*TWO, script)
    for _ in range(2):  # Under torchrun a rank aborts at its very end, once in a while.
        theirs = theirs if theirs.code == 0 else people.torchrun(*TWO, script)
    assert theirs.code == 0, theirs.text
    assert len(results_of(theirs.out)) == 1
    for _ in range(RUNS_OF_FRAMEWORKS):
        ours = people.argosy("run", *TWO, script)
        assert ours.code == 0, ours.text
        assert results_of(ours.out) == results_of(theirs.out)


@pytest.mark.system
@pytest.mark.timeout(900)
def test_lightning_starts_its_own_ranks_where_no_number_is_given(people: Console) -> None:
    theirs, ours = people.run([people.python, "boring.py"]), people.argosy("run", "boring.py")
    assert (theirs.code, ours.code) == (0, 0), theirs.text + ours.text
    assert results_of(ours.out) == results_of(theirs.out) != []


@pytest.mark.system
@pytest.mark.timeout(900)
def test_accelerates_own_test_passes(people: Console) -> None:
    people.env["ACCELERATE_USE_CPU"] = "true"  # else its processes do not find together without a GPU
    module = ["-m", "accelerate.test_utils.scripts.test_script"]
    theirs = people.torchrun(*TWO, *module)
    assert theirs.code == 0, theirs.text
    for _ in range(RUNS_OF_FRAMEWORKS):
        ours = people.argosy("run", *TWO, *module)
        assert ours.code == 0, ours.text
        assert "DistributedType.MULTI_CPU" in ours.out.decode()
        # torchrun mixes what two ranks write into one line now and then: we look for ours in what it wrote.
        assert {line for line in lines_of(ours.out) if line not in theirs.out.decode()} == set()
        assert {line for line in lines_of(theirs.out) if line.startswith("**")} <= lines_of(ours.out)
