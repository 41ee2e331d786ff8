"""A training on a token file is killed twice and resumed on fewer ranks: it sees what an undisturbed one sees."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from console import PATIENCE_S, Console, said, terminal

SCRIPT = Path(__file__).with_name("scripts") / "tokens.py"
STEPS = 40


def samples(text: str) -> dict[int, dict[int, list[int]]]:
    """The ids that each rank printed, by step."""
    found: dict[int, dict[int, list[int]]] = defaultdict(dict)
    for line in re.findall(r"STEP ([\d ]+)", text):
        step, rank, *ids = map(int, line.split())
        found[step][rank] = ids
    return found


def together(by_rank: dict[int, list[int]]) -> list[int]:
    return [index for rank in sorted(by_rank) for index in by_rank[rank]]


@pytest.mark.system
def test_killed_twice_and_resumed_on_one_rank(tmp_path: Path) -> None:
    np.random.default_rng(0).integers(0, 256, 16 * 100 + 1).astype(np.uint16).tofile(tmp_path / "train.bin")
    shutil.copy(SCRIPT, tmp_path / "tokens.py")
    words = ["tokens.py", "train.bin", str(STEPS)]
    with terminal(tmp_path) as console:
        quiet = console.run([sys.executable, *words])
        assert quiet.code == 0, quiet.text
        expected = {step: together(by_rank) for step, by_rank in samples(quiet.text).items()}
        assert sorted(index for step in range(25) for index in expected[step]) == sorted([*range(100)] * 4)
        shutil.rmtree(tmp_path / "kept")
        seen: list[dict[int, dict[int, list[int]]]] = []
        for number, step in enumerate((7, 16)):
            seen.append(samples(kill_at(console, words, tmp_path / f"out{number}", step)))
        last = console.run([sys.executable, *words])
        assert last.code == 0, last.text
    resumed = samples(last.text)
    assert min(resumed) == 15
    for attempt in (*seen, resumed):
        size = 2 if attempt is not resumed else 1
        for step, by_rank in attempt.items():
            if len(by_rank) == size:
                assert together(by_rank) == expected[step]
    assert set().union(*seen, resumed) == set(range(STEPS))


def kill_at(console: Console, words: list[str], out: Path, step: int) -> str:
    """Start two ranks under torchrun, kill one when it has printed `step`; returns all that was printed."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    with out.open("wb") as stream:
        env = {**console.env, "HOLD_AT": str(step)}
        process = subprocess.Popen([*torchrun, *words], stdout=stream, stderr=stream, cwd=console.cwd, env=env)
    console.started.append(process)
    said(out, f"STEP {step} 1")
    os.kill(int(said(out, r"PID 1 (\d+)")[1]), signal.SIGKILL)
    assert process.wait(PATIENCE_S) != 0
    return out.read_text()
