"""All records in SQL: Parquet files that a manifest names, and the newer ones; readers see whole sets."""

import os
import threading
from pathlib import Path

import pytest
from recordings import Recording, write_run

from argosy.insight import OpenedRun, segments
from argosy.observe import Journal, metrics_directory

COUNT = "SELECT count(*), count(DISTINCT step), min(name), max(name) FROM records"


def recording(rank: int) -> Recording:
    one = Recording(rank)
    for step in range(200):
        one.span("forward", step * 10, step * 10 + 9).step(step * 10 + 9)
    return one


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(segments, "ROWS_MIN", 100)
    return write_run(tmp_path / "run", [recording(0), recording(1)], 2500)


def append_again(directory: Path) -> None:
    """Let the drain write as much as there is once more."""
    spans = metrics_directory(directory, 1) / "spans"
    frames = [item.record for item in segments.follow(spans) if not isinstance(item, segments.Damage)]
    with Journal(spans) as journal:
        for frame in frames[:2]:
            journal.append(frame)


def test_files_are_made_once_and_what_is_newer_is_seen(directory: Path):
    assert OpenedRun(directory).sql(COUNT).rows[0][0] == 1200
    parquet = metrics_directory(directory, 1) / "parquet"
    (file,) = parquet.glob("*.parquet")
    made = file.stat().st_mtime_ns
    opened = OpenedRun(directory)
    append_again(directory)  # After it was opened: the tail is live.
    assert opened.sql(COUNT).rows[0][0] == 2400
    assert file.stat().st_mtime_ns == made


def test_readers_during_appends_and_joins_see_whole_sets(directory: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(segments, "FILES_MAX", 2)
    opened, counts, failed = OpenedRun(directory), list[int](), list[BaseException]()
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            try:
                counts.append(opened.sql(COUNT).rows[0][0])
            except BaseException as error:
                failed.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(8):
        append_again(directory)
        OpenedRun(directory).sql(COUNT)
    stop.set()
    reader.join()
    assert not failed
    assert counts == sorted(counts)
    assert all(count % 600 == 0 for count in counts)
    assert opened.sql(COUNT).rows[0][0] == 9 * 1200


@pytest.mark.parametrize("damage", ["cut off", "flipped", "missing", "manifest"])
def test_p1_damaged_files_are_made_again(directory: Path, damage: str):
    before = OpenedRun(directory).sql(COUNT).rows
    parquet = metrics_directory(directory, 1) / "parquet"
    (file,) = parquet.glob("*.parquet")
    raw = bytearray(file.read_bytes())
    if damage == "cut off":
        file.write_bytes(raw[: len(raw) // 2])
    elif damage == "flipped":
        raw[8 : len(raw) - 8] = os.urandom(len(raw) - 16)
        file.write_bytes(raw)
    elif damage == "missing":
        file.unlink()
    else:
        (parquet / "manifest.json").write_text("{")
    assert OpenedRun(directory).sql(COUNT).rows == before


def test_p2_a_directory_that_cannot_be_written_is_read(directory: Path):
    (metrics_directory(directory, 1) / "parquet").write_text("in the way")
    assert OpenedRun(directory).sql(COUNT).rows[0][0] == 1200


def test_other_files_stay_closed(directory: Path):
    OpenedRun(directory).sql(COUNT)
    secret = directory / "run.json"
    with pytest.raises(Exception, match="SQL"):
        OpenedRun(directory).sql(f"SELECT * FROM records, read_text('{secret}')")
