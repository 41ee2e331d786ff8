"""Very many steps with kills in between: nothing grows but the log, by what is logged."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
from console import Console, until

from argosy.train import read_log

SCRIPT = str(Path(__file__).parent / "scripts" / "tiny.py")
FOR_S = float(os.environ.get("ARGOSY_SOAK_S", "3600"))
KILL_EVERY_S = 15.0


def size_of(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


@pytest.mark.soak
@pytest.mark.timeout(FOR_S + 300)
def test_an_hour_of_tiny_steps_with_kills(console: Console, tmp_path: Path):
    chance, directory = random.Random(3), console.cwd / "tiny"
    run = console.start("run", "-n", "2", "--name", "tiny", SCRIPT, str(directory), out=tmp_path / "out.txt")
    until(lambda: (directory / "held.0").exists(), "the first steps")
    begun, kills, early = time.monotonic(), 0, 0
    while time.monotonic() < begun + FOR_S:
        time.sleep(KILL_EVERY_S)
        assert run.poll() is None, (tmp_path / "out.txt").read_text()[-4000:]
        alive = [rank["pid"] for rank in console.ps("tiny")["ranks"] if rank["pid"]]
        os.kill(chance.choice(alive), signal.SIGKILL)
        kills += 1
        if kills == 4:
            early = size_of(console.segments)
    time.sleep(KILL_EVERY_S)
    late = size_of(console.segments)
    assert console.argosy("stop", "tiny").code == 0
    lives = [line.split() for rank in (0, 1) for line in (directory / f"held.{rank}").read_text().splitlines()]
    by_pid: dict[str, list[tuple[int, int]]] = {}
    for _, resident, descriptors, pid in lives:
        by_pid.setdefault(pid, []).append((int(resident), int(descriptors)))
    for held in by_pid.values():
        first, last = held[len(held) // 4], held[-1]
        assert last[0] < first[0] + (16 << 20), held
        assert last[1] <= first[1] + 8, held
    assert late < early + (4 << 20)
    steps = max(int(step) for step, *_ in lives)
    rows = read_log(directory)
    assert [row.step for row in rows] == list(range(1, len(rows) + 1))
    assert steps > 100 * FOR_S / 10
    assert size_of(directory / "metrics") < 200 * len(rows) + (1 << 20)
    launch = Path(console.ps("tiny")["dir"])
    recorded = size_of(launch / "metrics")  # Two spans of 25 bytes a step and rank, compressed.
    assert recorded < 200 * len(rows) + (1 << 20)
    assert size_of(launch) - recorded < (8 << 20) + 100_000 * kills, "logs and facts"
    assert len(list((directory / "checkpoints").glob("step-*"))) <= 5
    grown = max(held[-1][0] - held[len(held) // 4][0] for held in by_pid.values())
    print(f"{kills} kills, {steps} steps, {grown >> 10} KiB grown at most, segments {early >> 10} to {late >> 10} KiB")
    print(f"descriptors {max(each[1] for held in by_pid.values() for each in held)}, spans {recorded >> 10} KiB")
