"""The plain script: the same under torchrun, under `argosy run`, and when it goes on from its own checkpoint."""

import os
import re
import signal
from pathlib import Path

import pytest
from console import REPOSITORY, Console, said

SCRIPT = str(REPOSITORY / "examples" / "plain.py")
STEPS = 50


def values_of(text: str) -> dict[int, str]:
    """The loss of each evaluation."""
    return {int(step): value for step, value in re.findall(r"step (\d+) +val (\S+)", text)}


def test_it_ends_alike_however_it_is_started(console: Console, tmp_path: Path) -> None:
    one = console.argosy("run", "-n", "1", SCRIPT, "one", str(STEPS), env={"OMP_NUM_THREADS": "1"})
    two = console.torchrun("--nproc-per-node", "2", SCRIPT, "two", str(STEPS))
    assert (one.code, two.code) == (0, 0), one.text + two.text
    alone, both = values_of(one.text), values_of(two.text)
    assert list(alone) == list(both) == [25, STEPS]
    assert float(both[STEPS]) < float(both[25]) < 4.0, "it learns"
    assert [float(value) for value in both.values()] == pytest.approx([float(v) for v in alone.values()], rel=1e-2)

    out = tmp_path / "out.txt"
    words = ["-n", "2", "--max-restarts", "1", "--name", "killed", SCRIPT, "killed", str(STEPS)]
    run = console.start("run", *words, out=out)
    victim = console.pid("killed", 1)
    said(out, r"step 30 +loss")
    os.kill(victim, signal.SIGKILL)
    assert run.wait(120) == 0, out.read_text()
    assert values_of(out.read_text()) == both
    assert len(re.findall(r"step 30 +loss", out.read_text())) == 2, "it went on from the checkpoint of step 25"

    again = console.argosy("run", "-n", "2", SCRIPT, "two", str(STEPS))
    assert again.code == 0, again.text
    assert values_of(again.text) == {}, "there was nothing left to do"
