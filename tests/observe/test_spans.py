"""The ring of spans keeps its promises R1-R3."""

import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from argosy.observe import Ring, read_spans, record_spans, span
from argosy.observe.ring_reader import RingReader
from argosy.observe.spans import NAMES_MAX


def test_a_reader_sees_spans_nested_and_going_on(tmp_path: Path):
    ring = Ring.create(tmp_path / "ring")
    ring.begin("step", 7)
    ring.begin("data", 7)
    ring.end("data", 7)
    ring.begin("forward", 7)
    step, data, forward = read_spans(tmp_path / "ring")
    assert (step.name, step.end, step.step, step.seconds) == ("step", 0, 7, 0.0)
    assert (data.name, data.step) == ("data", 7)
    assert step.begin <= data.begin <= data.end <= forward.begin
    assert forward.end == 0


def test_the_oldest_give_way_and_the_newest_are_all_there(tmp_path: Path):
    ring = Ring.create(tmp_path / "ring", capacity=64)
    for number in range(1000):
        ring.begin("data", number)
        ring.end("data", number)
    spans = read_spans(tmp_path / "ring")
    assert [each.step for each in spans] == list(range(1000 - len(spans), 1000))
    assert len(spans) >= 31


WRITER = """
import sys
from argosy.observe import Ring
ring = Ring.create(sys.argv[1], capacity=32)
print("there", flush=True)
for number in range(10**9):
    ring.begin("a" if number % 2 else "b", number)
    ring.end("a" if number % 2 else "b", number)
"""


def test_r1_what_is_read_while_it_is_written_is_never_torn_and_survives_kill_9(tmp_path: Path):
    path = tmp_path / "ring"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        seen, deadline = 0, time.monotonic() + 60
        while seen < 2000 and time.monotonic() < deadline:
            spans = read_spans(path)
            seen += len(spans)
            for each in spans:
                assert each.name == ("a" if each.step % 2 else "b")
                assert each.end == 0 or each.end >= each.begin
            steps = [each.step for each in spans]
            assert steps == sorted(set(steps))
        process.send_signal(signal.SIGKILL)
    assert seen >= 2000
    last = read_spans(path)
    assert len(last) >= 15
    assert all(each.end >= each.begin for each in last[:-1])


def test_r2_a_full_filesystem_is_an_error_and_leaves_no_file(tmp_path: Path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        with pytest.raises(OSError, match=r"."):
            Ring.create(tmp_path / "ring")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert not (tmp_path / "ring").exists()


def test_r3_a_forked_child_records_nowhere(tmp_path: Path):
    record_spans(Ring.create(tmp_path / "ring"))
    try:
        with span("mine"):
            pid = os.fork()
            if pid == 0:
                with span("child's"):
                    os._exit(0)
            os.waitpid(pid, 0)
        assert [each.name for each in read_spans(tmp_path / "ring")] == ["mine"]
    finally:
        record_spans(Ring.void())


def test_what_is_no_ring_is_said(tmp_path: Path):
    (tmp_path / "other").write_bytes(bytes(5000))
    with pytest.raises(ValueError, match="not a ring of spans"):
        read_spans(tmp_path / "other")


def test_threads_that_come_and_go_all_record(tmp_path: Path):
    ring = Ring.create(tmp_path / "ring")
    for _ in range(100):
        threads = [threading.Thread(target=lambda: (ring.begin("work"), ring.end("work"))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    spans = read_spans(tmp_path / "ring")
    assert len(spans) == 400
    assert all(span.end >= span.begin > 0 for span in spans)


@pytest.mark.parametrize("seed", range(20))
def test_a_ring_of_garbage_is_refused_or_read(tmp_path: Path, seed: int):
    ring = Ring.create(tmp_path / "ring", capacity=64)
    for step in range(40):
        ring.point("step", step)
    chance = random.Random(seed)
    raw = bytearray((tmp_path / "ring").read_bytes())
    for _ in range(200):
        raw[chance.randrange(len(raw) if seed % 2 else 300)] = chance.randrange(256)
    if seed % 5 == 0:
        del raw[chance.randrange(len(raw)) :]
    (tmp_path / "other").write_bytes(raw)
    try:
        reader = RingReader(tmp_path / "other")
    except ValueError:
        return
    reader.take()
    assert reader.take() is None
    assert len(reader.names()) <= NAMES_MAX
