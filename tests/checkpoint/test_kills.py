"""Kill -9 at random moments of saving: what loads is bitwise a saved step, and no acknowledged one is lost."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import argosy
from argosy.checkpoint import KeepLast, Saver, StepNotFound, restore

CELLS = 600_001
TRAINING = f"""
import sys
import numpy as np
from argosy.checkpoint import KeepLast, Saver, StepNotFound, restore
directory, number = sys.argv[1], 0
state = {{name: np.zeros({CELLS}, "<f4") for name in ("weight", "moment")}}
try:
    number = restore(directory, into=state).step
except StepNotFound:
    pass
saver = Saver(directory, keep=[KeepLast(2)])
print("begun", number, flush=True)
while True:
    number += 1
    state["weight"][:] = np.random.default_rng(number).random({CELLS}, np.float32)
    state["moment"][:] = -state["weight"]
    handle = saver.save(state, number)
    if number % 3:
        handle.wait(60)
        print("durable", number, flush=True)
"""


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(Path(argosy.__file__).parents[1])}


def killed_once(directory: Path, rng: random.Random) -> int:
    """Train, kill at a random moment, and return the last step that was acknowledged."""
    command = [sys.executable, "-c", TRAINING, str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stdout
        begun = int(process.stdout.readline().split()[1])
        time.sleep(rng.random() * 0.4)
        process.kill()
        lines = process.stdout.read().splitlines()
    whole = [line.split() for line in lines if line.startswith("durable ")]
    return max([int(words[1]) for words in whole if len(words) == 2], default=begun)


def check(directory: Path, acknowledged: int) -> None:
    try:
        found = restore(directory)
    except StepNotFound:
        assert acknowledged == 0
        return
    assert found.step >= acknowledged
    assert found.skipped == []
    wanted = np.random.default_rng(found.step).random(CELLS, np.float32)
    assert found.tensors["weight"].numpy().tobytes() == wanted.tobytes()
    assert found.tensors["moment"].numpy().tobytes() == (-wanted).tobytes()


def test_ten_kills_lose_nothing(tmp_path: Path):
    rng = random.Random(0)
    for _ in range(10):
        check(tmp_path, killed_once(tmp_path, rng))
    with Saver(tmp_path, keep=[KeepLast(1)]) as saver:
        saver.save({"a": np.zeros(3)}, 10**6).wait(30)
    # What the killed left behind is gone with the next save.
    assert len(list((tmp_path / "checkpoints").glob("step-*"))) == 1


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_thousand_kills_lose_nothing(tmp_path: Path):
    rng = random.Random(1)
    for _ in range(1000):
        check(tmp_path, killed_once(tmp_path, rng))
