"""Kill -9 at random moments of saving: what loads is bitwise a saved step, and no acknowledged one is lost."""

import os
import random
import time
from pathlib import Path

import numpy as np
import pytest
from checkpoint.trainings import Training, is_saved

from argosy.checkpoint import KeepLast, Saver, StepNotFound, restore


def killed_once(directory: Path, rng: random.Random) -> int:
    """Train, kill at a random moment, and return the last step that was acknowledged."""
    with Training(directory) as training:
        begun, _ = training.until("begun")
        time.sleep(rng.random() * 0.2)
        return max(begun, training.kill())


def kills(directory: Path, times: int, seed: int) -> None:
    rng = random.Random(seed)
    open_before = len(os.listdir("/proc/self/fd"))
    for number in range(times):
        acknowledged = killed_once(directory, rng)
        try:
            found = restore(directory)
        except StepNotFound:
            assert acknowledged == 0, f"seed {seed}, kill {number}"
            continue
        assert found.step >= acknowledged, f"seed {seed}, kill {number}"
        assert found.skipped == [], f"seed {seed}, kill {number}"
        assert is_saved(found, found.step), f"seed {seed}, kill {number}"
    with Saver(directory, keep=[KeepLast(1)]) as saver:
        saver.save({"a": np.zeros(3)}, 10**6).wait(300)
    # What the killed left behind is gone with the next save.
    assert len(list((directory / "checkpoints").glob("step-*"))) == 1
    assert len(os.listdir("/proc/self/fd")) <= open_before + 4  # The fork server's.


def test_ten_kills_lose_nothing(tmp_path: Path):
    kills(tmp_path, 10, seed=0)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(1, 11))
def test_a_thousand_kills_lose_nothing(tmp_path: Path, seed: int):
    kills(tmp_path, 100, seed)
