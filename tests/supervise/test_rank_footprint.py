"""What ranks leave in shared memory does not grow with their deaths; what they leave alive ends with their run."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from argosy.core import RankId
from argosy.supervise.agent.rank_footprint import RankFootprint
from argosy.supervise.cgroup import MARK


def test_only_the_last_life_of_a_rank_leaves_a_page(tmp_path: Path):
    footprint = RankFootprint("run", tmp_path, None)
    for generation in range(5):
        for index in (1, 11):
            rank = RankId("ranks", index, generation)
            footprint.prepare(rank)
            Path(footprint.page(rank)).touch()
            Path(f"{footprint.page(rank)}.spans").touch()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {f"{index}.{life}.page{end}" for index in (1, 11) for life in (3, 4) for end in ("", ".spans")}


def asleep(rank: RankId) -> "subprocess.Popen[bytes]":
    """A process in a group of its own that carries a rank's mark."""
    program = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]
    process = subprocess.Popen(program, env={MARK: f"run/{rank}"}, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_when_a_run_is_cleared_neither_seen_nor_unseen_nor_dying_processes_live(tmp_path: Path):
    """The simulated world (`control/world.py`) ends all of them with the removal of their run."""
    footprint = RankFootprint("run", tmp_path, None)
    ranks = [RankId("main", index, 0) for index in range(3)]
    seen, unseen, dying = processes = [asleep(rank) for rank in ranks]
    with seen, unseen, dying:
        for rank in ranks:
            footprint.prepare(rank)
        footprint.groups[ranks[0]] = seen.pid
        os.kill(dying.pid, signal.SIGSTOP)  # A stopped process is killed all the same.
        os.kill(dying.pid, signal.SIGKILL)
        footprint.clear()
        assert [process.poll() for process in processes] == [-9, -9, -9]
