"""Tracebacks of ranks that failed because another one had: one line each in the terminal, whole in their logs."""

from pathlib import Path

import pytest
from console import Console
from daemons import script

from argosy.cli.fold import HOLD_S, Folder
from argosy.supervise.output.stream import Out

LOST = b"""[rank2]: Traceback (most recent call last):
[rank2]:   File "train.py", line 6, in <module>
[rank2]: RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:545] Connection closed by peer [127.0.0.1]:4711"""
OWN = b"Traceback (most recent call last):\nValueError: bad batch"


def out(rank: int, text: bytes) -> Out:
    return Out("stderr", frozenset([rank]), text)


@pytest.fixture
def folder() -> Folder:
    return Folder(lambda rank, stream: f"logs/{rank}.{stream}")


def test_a_lost_connection_waits_for_the_first_failure_and_is_folded(folder: Folder):
    assert folder.take([out(2, LOST), out(2, b"behind it"), out(0, b"another rank's")], 0.0) == [
        out(0, b"another rank's")
    ]
    folder.first = 1
    assert folder.take([], 0.1) == [
        "rank 2 failed after rank 1: RuntimeError: Connection closed by peer [127.0.0.1]:4711; "
        "full text: logs/2.stderr",
        out(2, b"behind it"),
    ]


def test_a_long_message_is_cut_between_words(folder: Folder):
    folder.first = 1
    (line,) = folder.take([out(2, LOST + b". This is typically caused by another process")], 0.1)
    assert isinstance(line, str)
    assert "Connection closed by peer [127.0.0.1]:4711. This is typically ...; full text" in line


def test_the_first_failure_is_shown_whole_whatever_it_is(folder: Folder):
    assert folder.take([out(1, OWN)], 0.0) == [out(1, OWN)]
    folder.first = 2
    assert folder.take([out(2, LOST), out(0, OWN)], 0.1) == [out(0, OWN), out(2, LOST)]


@pytest.mark.parametrize(("now", "final"), [(HOLD_S, False), (0.1, True)])
def test_without_a_first_failure_it_is_shown_whole(folder: Folder, now: float, final: bool):
    assert folder.take([out(2, LOST)], 0.0) == []
    assert folder.take([], now, final=final) == [out(2, LOST)]


FAILS = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(100):
    dist.all_reduce(torch.ones(3))
    if step == 20 and dist.get_rank() == 1:
        os.kill(os.getpid(), 9) if sys.argv[1] == "dies" else None
        raise ValueError("bad batch")
"""


@pytest.mark.parametrize("how", ["dies", "raises"])
def test_survivors_say_one_line_each(host: Console, how: str):
    pytest.importorskip("torch")
    ended = host.argosy("run", "-n", "3", "--name", how, script(host, FAILS), how)
    assert ended.code == (137 if how == "dies" else 1)
    assert ended.text.count("Traceback") == (how == "raises")
    assert ended.text.count("ValueError: bad batch\n") == (how == "raises")
    lines = [line for line in ended.text.splitlines() if "failed after rank 1: " in line]
    assert sorted(line.split()[2] for line in lines) == ["0", "2"]
    assert all(len(line) < 250 for line in lines)
    for line in lines:
        text = (host.cwd / Path(line.rpartition("full text: ")[2])).read_text()
        assert "Traceback" in text
        assert "collective_hooks" not in text, "a frame of Argosy's own"
