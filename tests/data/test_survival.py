"""Samples counted: ranks and workers are killed, steps rolled back, ranks resized; each sample once per epoch."""

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest

from argosy.data.order import Order, Shuffle

SCRIPT = Path(__file__).with_name("scripts") / "rank.py"
TESTS = Path(__file__).parents[1]
BATCH, SEED, EPOCHS = 24, 11, 3


class Phase:
    """`size` ranks run to step `until`; whoever is killed is started again and resumes."""

    def __init__(self, directory: Path, size: int, length: int, until: int) -> None:
        directory.mkdir(exist_ok=True)
        self.directory, self.size, self.length, self.until = directory, size, length, until
        self.ranks = [self.start(rank) for rank in range(size)]

    def start(self, rank: int) -> subprocess.Popen[bytes]:
        path = os.pathsep.join([str(TESTS), *filter(None, sys.path)])
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(self.size), "PYTHONPATH": path}
        words = [sys.executable, str(SCRIPT), str(self.directory), str(self.length), str(self.until)]
        return subprocess.Popen(words, env=env)

    def strike(self, dice: random.Random) -> bool:
        """Kill a rank, a worker or a template at random."""
        rank = dice.randrange(self.size)
        process = self.ranks[rank]
        if process.poll() is not None:
            return False
        if dice.random() < 0.2:
            process.kill()
            process.wait()
            self.ranks[rank] = self.start(rank)
            return True
        with contextlib.suppress(psutil.NoSuchProcess):
            helpers = psutil.Process(process.pid).children(recursive=True)
            if helpers:
                dice.choice(helpers).kill()
                return True
        return False

    def end(self) -> None:
        for process in self.ranks:
            process.kill()
            process.wait()

    def committed(self) -> dict[int, list[int]]:
        """What all ranks committed in each step, in rank order; attempts of one step agree."""
        result: dict[int, list[int]] = {}
        for rank in range(self.size):
            steps: dict[int, list[int]] = {}
            for line in (self.directory / f"log-{rank}").read_text().splitlines():
                step, ids = json.loads(line)
                assert steps.setdefault(step, ids) == ids
            for step, ids in steps.items():
                result.setdefault(step, []).extend(ids)
        return result


def count_samples(directory: Path, length: int, kills: int, sizes: list[int], seed: int) -> int:
    """Run 3 epochs under up to `kills` SIGKILLs; returns how many there were before the ranks came to the end."""
    dice = random.Random(seed)
    steps = length * EPOCHS // BATCH
    done = 0
    seen: dict[int, list[int]] = {}
    before: Path | None = None
    for number, size in enumerate(sizes):
        place = directory / f"phase-{number}"
        place.mkdir()
        if before is not None:
            shutil.copy(before / "state-0.json", place / "start.json")
        phase = Phase(place, size, length, steps * (number + 1) // len(sizes))
        goal = kills * (number + 1) // len(sizes)
        try:
            while any(process.poll() is None for process in phase.ranks):
                time.sleep(dice.uniform(0.02, 0.2))
                done += done < goal and phase.strike(dice)
            assert [process.returncode for process in phase.ranks] == [0] * size
        finally:
            phase.end()
        seen |= phase.committed()
        before = place
    order = [index for step in range(steps) for index in seen[step]]
    assert order == Order(length, Shuffle.full(), SEED).at(np.arange(len(order)))[1].tolist()
    assert Counter(order) == dict.fromkeys(range(length), EPOCHS)
    return done


@pytest.mark.system
def test_each_sample_once_per_epoch_under_kills_and_resizes(tmp_path: Path):
    assert count_samples(tmp_path, 480, kills=50, sizes=[1, 2, 4, 3], seed=5) >= 15


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_each_sample_once_per_epoch_under_a_thousand_kills(tmp_path: Path):
    assert count_samples(tmp_path, 14_400, kills=1000, sizes=[1, 2, 4, 3, 1, 4, 2, 3], seed=6) >= 900
