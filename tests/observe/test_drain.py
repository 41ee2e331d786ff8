"""The drain moves what ranks recorded to files, and keeps its promises D1-D3."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
from console import PATIENCE_S, until

from argosy.observe import Damage, DrainProcess, Ring, SpanKind, encode_frame, metrics_directory, read_frames

COMMAND = [sys.executable, "-m", "argosy.observe.drain"]


def start_drain(memory: Path, run: Path) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([*COMMAND, str(memory), str(run), "1"])


def drained(run: Path) -> tuple[list[int], int]:
    """The arguments of all records of rank 0 in order, and how many were lost."""
    found, lost = list[int](), 0
    for item in read_frames(metrics_directory(run, 1) / "spans"):
        assert not isinstance(item, Damage)
        frame, columns = item
        assert (columns["kind"] == SpanKind.POINT).all()
        found += columns["argument"].tolist()
        lost += frame.about["lost"]
    return found, lost


def test_records_arrive_in_order_and_the_end_takes_all(tmp_path: Path):
    memory, run = tmp_path / "memory", tmp_path / "run"
    memory.mkdir()
    ring = Ring.create(memory / "0.0.page.spans")
    drain = DrainProcess(memory, run, 1)
    drain.tend()  # Nothing is recorded: nothing starts.
    drain.finish()
    assert not run.exists()
    (memory / "drain.end").unlink()
    drain = DrainProcess(memory, run, 1)
    for number in range(100):
        ring.point("a" if number % 2 else "b", None, number)
    drain.tend()
    until(lambda: drained(run)[0] == list(range(100)), "the first records in the file")
    for number in range(100, 150):
        ring.point("c", None, number)
    drain.finish()
    assert drained(run) == (list(range(150)), 0)
    samples = [item for item in read_frames(metrics_directory(run, 1) / "samples") if not isinstance(item, Damage)]
    assert {frame.what for frame, _ in samples} == {"host", "rank"}


def test_d2_a_killed_drain_is_followed_by_one_that_continues_where_the_file_ends(tmp_path: Path):
    memory, run = tmp_path / "memory", tmp_path / "run"
    memory.mkdir()
    ring = Ring.create(memory / "0.0.page.spans")
    ring.point("a", None, 0)
    first = start_drain(memory, run)
    until(lambda: drained(run)[0] == [0], "the first record in the file")
    second = start_drain(memory, run)
    assert second.wait(PATIENCE_S) == 3  # D1
    ring.point("a", None, 1)
    first.send_signal(signal.SIGKILL)
    first.wait()
    ring.point("new name", None, 2)
    (memory / "drain.end").touch()
    assert start_drain(memory, run).wait(60) == 0
    assert drained(run) == ([0, 1, 2], 0)


def test_d3_what_does_not_fit_is_counted(tmp_path: Path):
    memory, run = tmp_path / "memory", tmp_path / "run"
    memory.mkdir()
    ring = Ring.create(memory / "0.0.page.spans", capacity=64)
    for number in range(1000):
        ring.point("a", None, number)
    (memory / "drain.end").touch()
    assert start_drain(memory, run).wait(60) == 0
    found, lost = drained(run)
    assert found == list(range(1000 - len(found), 1000))
    assert len(found) >= 63
    assert len(found) + lost == 1000


def test_d3_a_directory_that_cannot_be_made_stops_nothing(tmp_path: Path):
    memory, run = tmp_path / "memory", tmp_path / "run"
    memory.mkdir()
    run.write_text("a file where the run's directory should be")
    Ring.create(memory / "0.0.page.spans").point("a")
    (memory / "drain.end").touch()
    assert start_drain(memory, run).wait(60) == 0


def test_damage_is_named_and_hides_nothing_else(tmp_path: Path):
    columns = {"time": np.arange(5) * 1000, "value": np.ones(5, np.float32)}
    records = [encode_frame("spans", columns, {"n": number}) for number in range(3)]
    from argosy.observe import Journal

    path = tmp_path / "spans"
    with Journal(path) as journal:
        for record in records:
            journal.append(record)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    path.write_bytes(raw + b"torn")
    items = list(read_frames(path))
    assert sum(isinstance(item, Damage) for item in items) == 1
    frames = [item for item in items if not isinstance(item, Damage)]
    assert [frame.about["n"] for frame, _ in frames] == [0, 2]
    assert frames[0][1]["time"].tolist() == [0, 1000, 2000, 3000, 4000]
    assert os.listdir(tmp_path) == ["spans"]
