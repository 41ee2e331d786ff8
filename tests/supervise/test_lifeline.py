"""The FIFO that keeps ranks alive also knows its zygotes, and whether the directory is still the one it was."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from console import PATIENCE_S

from argosy.supervise.lifeline import Lifeline

ZYGOTE = """
import sys, pathlib
from argosy.supervise.lifeline import Lifeline
held = Lifeline(pathlib.Path(sys.argv[1]), zygote=True)
print("held", flush=True)
sys.stdin.read()
"""


def test_all_zygotes_are_known_and_none_that_has_ended(tmp_path: Path):
    line = Lifeline(tmp_path)
    assert line.zygotes() == []
    words = [sys.executable, "-c", ZYGOTE, str(tmp_path)]
    zygotes = [subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(3)]
    for zygote in zygotes:
        assert zygote.stdout is not None
        zygote.stdout.readline()
    assert set(line.zygotes()) == {zygote.pid for zygote in zygotes}
    zygotes[1].kill()
    zygotes[1].wait(PATIENCE_S)
    assert set(line.zygotes()) == {zygotes[0].pid, zygotes[2].pid}
    for zygote in zygotes:
        zygote.communicate(timeout=60)
    assert line.zygotes() == []


def test_it_is_in_place_until_it_is_removed_and_replaced_once_another_is_there(tmp_path: Path):
    line = Lifeline(tmp_path)
    assert (line.in_place, line.replaced) == (True, False)
    os.unlink(tmp_path / "lifeline")
    assert (line.in_place, line.replaced) == (False, False)
    other = Lifeline(tmp_path)
    assert (line.in_place, line.replaced) == (False, True)
    assert other.in_place


RANK = """
import os, sys, pathlib, time
from argosy.supervise.lifeline import tie_lifeline
os.setpgid(0, 0)
tie_lifeline(pathlib.Path(sys.argv[1]))
print("tied", flush=True)
time.sleep(600)
"""


def test_a_rank_ends_with_the_last_holder_and_at_once_if_that_has_ended_already(tmp_path: Path):
    words = [sys.executable, "-c", RANK, str(tmp_path)]
    line = Lifeline(tmp_path)
    rank = subprocess.Popen(words, stdout=subprocess.PIPE)
    assert rank.stdout is not None
    assert rank.stdout.readline() == b"tied\n"
    os.close(line._fd)  # pyright: ignore[reportPrivateUsage]
    assert rank.wait(PATIENCE_S) == -signal.SIGKILL
    rank.stdout.close()
    late = subprocess.run(words, stdout=subprocess.PIPE, timeout=300)
    assert (late.returncode, late.stdout) == (-signal.SIGKILL, b"")
