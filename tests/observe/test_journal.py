"""The journal keeps its promises J1-J3."""

import os
import random
import resource
import signal
import time
from pathlib import Path

import pytest
from seeds import each

from argosy.observe import Damage, DamagedJournal, Journal, JournalEntry, follow, read_journal

RECORDS = [b"first", b"", b"x" * 3_000_000, "zuletzt: ä".encode()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with Journal(tmp_path / "journal") as journal:
        for record in RECORDS:
            journal.append(record, sync=record == b"first")
    return tmp_path / "journal"


def test_what_was_appended_is_read_in_order(path: Path):
    assert list(read_journal(path)) == RECORDS
    with Journal(path) as journal:
        journal.append(b"later")
    assert list(read_journal(path)) == [*RECORDS, b"later"]


def test_j1_a_torn_tail_ends_the_records_quietly(tmp_path: Path):
    with Journal(tmp_path / "journal") as journal:
        journal.append(b"kept")
        journal.append(b"torn away")
    whole = (tmp_path / "journal").read_bytes()
    for length in range(16, len(whole)):  # the first frame is 12 + 4 bytes
        (tmp_path / "journal").write_bytes(whole[:length])
        assert list(read_journal(tmp_path / "journal")) == [b"kept"]


def test_j1_a_killed_writer_leaves_whole_records(tmp_path: Path):
    child = os.fork()
    if child == 0:
        journal = Journal(tmp_path / "journal")
        for number in range(10_000_000):
            journal.append(b"%d" % number * 50)
        os._exit(0)
    deadline = time.monotonic() + 60
    while not (tmp_path / "journal").exists() or (tmp_path / "journal").stat().st_size < 100_000:
        assert time.monotonic() < deadline
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    records = list(read_journal(tmp_path / "journal"))
    assert len(records) > 100
    assert records == [b"%d" % number * 50 for number in range(len(records))]


@pytest.mark.parametrize("untruncated", [False, True])
def test_j2_a_full_disk_loses_one_record_and_no_later_one(tmp_path: Path, untruncated: bool):
    """A limit on the size of files stands in for a full disk."""
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.append(b"before")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            journal.append(b"lost" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    if untruncated:  # as if the part that fitted could not be taken back
        with path.open("ab") as file:
            file.write(b"\xa7Jr\x01\xff\xff\x00\x00torn")
    journal.append(b"after")
    journal.close()
    items = list(follow(path))
    assert [item.record for item in items if isinstance(item, JournalEntry)] == [b"before", b"after"]
    assert [item for item in items if isinstance(item, Damage)] == [Damage(18, 12)] * untruncated


@each("seed", range(100))
def test_j3_damage_in_the_middle_is_reported_with_its_place(tmp_path: Path, seed: int):
    noise = random.Random(seed)
    records = [noise.randbytes(noise.randrange(200)) for _ in range(8)]
    path = tmp_path / "journal"
    with Journal(path) as journal:
        for record in records:
            journal.append(record)
    whole = bytearray(path.read_bytes())
    starts = [12 * n + sum(map(len, records[:n])) for n in range(9)]
    hurt = noise.randrange(7)
    whole[noise.randrange(starts[hurt], starts[hurt + 1])] ^= 1 << noise.randrange(8)
    path.write_bytes(whole)
    items = list(follow(path))
    assert [i.record for i in items if isinstance(i, JournalEntry)] == records[:hurt] + records[hurt + 1 :]
    damage = Damage(starts[hurt], starts[hurt + 1] - starts[hurt])
    assert [i for i in items if isinstance(i, Damage)] == [damage]
    with pytest.raises(DamagedJournal, match=f"{damage.length} damaged bytes at offset {damage.offset}"):
        list(read_journal(path))


def test_following_goes_on_where_it_ended(tmp_path: Path):
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.append(b"one")
    (entry,) = follow(path)
    assert isinstance(entry, JournalEntry)
    assert list(follow(path, entry.end)) == []
    journal.append(b"two")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])  # seen while it is being written
    assert list(follow(path, entry.end)) == []
    path.write_bytes(whole)
    assert list(follow(path, entry.end)) == [JournalEntry(b"two", len(whole))]
    journal.close()


def test_a_record_that_is_too_large_is_refused_whole(path: Path):
    size = path.stat().st_size
    with Journal(path) as journal, pytest.raises(ValueError, match="at most"):
        journal.append(bytes((64 << 20) + 1))
    assert path.stat().st_size == size
