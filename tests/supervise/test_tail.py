"""Reading many logs while they grow."""

import os
import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from seeds import each

from argosy.supervise.output.logfile import punch_hole
from argosy.supervise.output.tail import IDLE_MAX_S, IDLE_MIN_S, READ_MAX, ROUND_MAX, Tail

MB = 1 << 20


@pytest.fixture
def tail() -> Iterator[Tail]:
    with closing(Tail()) as it:
        yield it


def append(path: Path, data: bytes) -> None:
    with path.open("ab", buffering=0) as file:
        file.write(data)


def read_all(tail: Tail, rank: int = 0) -> bytes:
    seen = b""
    while chunks := tail.poll():
        seen += b"".join(data for r, _, data in chunks if r == rank)
    return seen


def test_a_file_is_read_as_it_appears_and_grows(tail: Tail, tmp_path: Path):
    path = tmp_path / "3.0.err"
    tail.add(3, "stderr", str(path))
    assert tail.poll() == []
    append(path, b"one\n")
    assert tail.poll() == [(3, "stderr", b"one\n")]
    assert tail.poll() == []
    append(path, b"two\n")
    assert tail.poll() == [(3, "stderr", b"two\n")]
    assert tail.poll() == []


def test_a_flood_does_not_starve_the_others(tail: Tail, tmp_path: Path):
    for rank in range(8):
        append(tmp_path / str(rank), b"x" * (4 * MB if rank == 0 else 10))
        tail.add(rank, "stdout", str(tmp_path / str(rank)))
    chunks = tail.poll()
    assert {rank for rank, _, _ in chunks} == set(range(8))
    assert sum(len(data) for _, _, data in chunks) <= ROUND_MAX


def test_one_flood_is_read_in_large_pieces(tail: Tail, tmp_path: Path):
    append(tmp_path / "0", b"x" * MB)
    tail.add(0, "stdout", str(tmp_path / "0"))
    assert len(tail.poll()[0][2]) == READ_MAX


def test_more_floods_than_one_round_serves_take_turns(tail: Tail, tmp_path: Path):
    size = 300
    for rank in range(size):
        append(tmp_path / str(rank), b"x" * 50_000)
        tail.add(rank, "stdout", str(tmp_path / str(rank)))
    first = {rank for rank, _, _ in tail.poll()}
    assert len(first) < size
    assert first | {rank for rank, _, _ in tail.poll()} | {rank for rank, _, _ in tail.poll()} == set(range(size))


def test_a_reader_that_lags_takes_large_pieces_and_still_turns(tmp_path: Path):
    for lag_max, piece in ((MB, READ_MAX), (None, ROUND_MAX // 16)):
        with closing(Tail(lag_max=lag_max)) as tail:
            for rank in range(16):
                (tmp_path / str(rank)).write_bytes(b"x" * MB)
                tail.add(rank, "stdout", str(tmp_path / str(rank)))
            chunks = [chunk for _ in range(4) for chunk in tail.poll()]
        assert {len(data) for _, _, data in chunks} == {piece}
        assert {rank for rank, _, _ in chunks} == set(range(16))


def test_a_hole_is_skipped_and_told(tail: Tail, tmp_path: Path):
    path = tmp_path / "log"
    append(path, b"a" * MB + b"b" * (312 * MB // 8) + b"tail\n")
    fd = os.open(path, os.O_RDWR)
    punch_hole(fd, MB, 312 * MB // 8 // 4096 * 4096)
    os.close(fd)
    tail.add(0, "stdout", str(path))
    assert read_all(tail) == b"a" * MB + b"\n... 41 MB of this log were cut here ...\ntail\n"


@each("seed", range(20))
def test_zeros_of_a_copied_hole_are_told_once_wherever_they_lie(tail: Tail, tmp_path: Path, seed: int):
    random_ = random.Random(seed)
    before = b"b" * random_.randrange(1, 600_000) + b"\n"
    zeros = random_.randrange(20_000, 900_000)
    append(tmp_path / "log", before + b"\0" * zeros + b"after \0 all\n")
    tail.add(0, "stdout", str(tmp_path / "log"))
    assert read_all(tail) == before + b"... %d kB of this log were cut here ...\nafter \0 all\n" % round(zeros / 1e3)


def test_a_few_zeros_are_the_ranks_own(tail: Tail, tmp_path: Path):
    append(tmp_path / "log", b"a\0\0b\0\0")
    tail.add(0, "stdout", str(tmp_path / "log"))
    assert read_all(tail) == b"a\0\0b\0\0"


def test_a_truncated_file_is_read_from_what_is_new(tail: Tail, tmp_path: Path):
    path = tmp_path / "log"
    append(path, b"old lines\n")
    tail.add(0, "stdout", str(path))
    tail.poll()
    os.truncate(path, 0)
    append(path, b"new\n")
    assert read_all(tail) == b"new\n"


def test_a_renamed_file_is_read_to_its_end_and_then_its_successor(tail: Tail, tmp_path: Path):
    path = tmp_path / "log"
    append(path, b"one\n")
    tail.add(0, "stdout", str(path))
    tail.poll()
    path.rename(tmp_path / "log.1")
    append(tmp_path / "log.1", b"two\n")
    append(path, b"three\n")
    seen = b"".join(data for _ in range(100) for _, _, data in tail.poll())
    assert seen == b"two\nthree\n"


def test_a_deleted_file_is_still_read(tail: Tail, tmp_path: Path):
    path = tmp_path / "log"
    with path.open("ab", buffering=0) as writer:
        tail.add(0, "stdout", str(path))
        writer.write(b"one\n")
        tail.poll()
        path.unlink()
        writer.write(b"two\n")
        assert b"".join(data for _ in range(100) for _, _, data in tail.poll()) == b"two\n"


def test_a_directory_in_place_of_a_file_harms_nobody(tail: Tail, tmp_path: Path):
    tail.add(0, "stdout", str(tmp_path))
    tail.add(1, "stdout", str(tmp_path / "log"))
    append(tmp_path / "log", b"x\n")
    assert [chunk for _ in range(5) for chunk in tail.poll()] == [(1, "stdout", b"x\n")]


def test_silence_slows_the_polls_and_a_word_quickens_them(tail: Tail, tmp_path: Path):
    tail.add(0, "stdout", str(tmp_path / "log"))
    for _ in range(50):
        tail.poll()
    assert tail.idle_s() == IDLE_MAX_S
    append(tmp_path / "log", b"x")
    tail.poll()
    assert tail.idle_s() == IDLE_MIN_S
