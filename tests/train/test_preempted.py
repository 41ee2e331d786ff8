"""SIGTERM that arrives while a rank is missing: the survivors save the newest step, or say what is lost."""

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from console import PATIENCE_S, Console, terminal, until

from argosy.checkpoint import list_steps
from argosy.train import read_log

SCRIPT = str(Path(__file__).parent / "scripts" / "preempted.py")


@pytest.fixture(scope="module")
def dock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    """One terminal for all runs: the zygote stays warm."""
    with terminal(tmp_path_factory.mktemp("dock")) as console:
        yield console


def digests(text: str) -> str:
    return next(line.partition("digests")[2] for line in text.splitlines() if "digests" in line)


def preempt(dock: Console, directory: Path, kind: str, ranks: int, killed: Sequence[int]) -> str:
    """Kill ranks in step 6 and send SIGTERM at once; returns what the run printed."""
    directory.mkdir()
    out = directory / "said"
    command = dock.start("run", "-n", str(ranks), SCRIPT, str(directory), kind, out=out)
    waits = [directory / f"waits.{rank}" for rank in range(ranks)]
    until(lambda: all(path.exists() and path.read_text() for path in waits), "all ranks in step 6")
    until(lambda: [step.step for step in list_steps(directory)] == [4], "the checkpoint of step 4")
    for rank in killed:
        os.kill(int(waits[rank].read_text()), signal.SIGKILL)
    command.send_signal(signal.SIGTERM)
    assert command.wait(PATIENCE_S) == 128 + signal.SIGTERM, out.read_text()
    return out.read_text()


@pytest.mark.parametrize(
    ("kind", "ranks", "killed"),
    [("messy", 3, [0]), pytest.param("hybrid", 4, [0, 3], marks=pytest.mark.system)],
    ids=["replicas", "shards and replicas"],
)
def test_survivors_save_the_newest_step(dock: Console, kind: str, ranks: int, killed: list[int]):
    directory, calm = dock.cwd / f"{kind}-{ranks}", dock.cwd / f"{kind}-{ranks}-calm"
    said = preempt(dock, directory, kind, ranks, killed)
    assert max(step.step for step in list_steps(directory)) == 6, said
    assert said.count("saved step 6") == 1, said
    assert "Traceback" not in said
    resumed = dock.argosy("run", "-n", str(ranks), SCRIPT, str(directory), kind, "go")
    assert resumed.code == 0, resumed.text
    undisturbed = dock.argosy("run", "-n", str(ranks), SCRIPT, str(calm), kind, "go")
    assert digests(resumed.text) == digests(undisturbed.text)
    assert [row.step for row in read_log(directory)] == list(range(1, 10))


def test_what_no_survivor_has_is_reported_as_lost(dock: Console):
    """Each rank of a pipeline has another part of the model."""
    said = preempt(dock, dock.cwd / "staged", "staged", 2, [1])
    assert [step.step for step in list_steps(dock.cwd / "staged")] == [4]
    assert said.count("steps 5 to 6 are lost; the newest checkpoint is of step 4") == 1, said
