"""A log that stays bounded under a writer that knows nothing of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from argosy.supervise.output.logfile import bound
from argosy.supervise.output.tail import Tail

MB = 1 << 20


def line(number: int) -> bytes:
    return b"%098d\n" % number


def write(path: Path, bytes_count: int) -> int:
    """Append numbered lines of 99 bytes; return how many."""
    count = bytes_count // 99
    with path.open("ab", buffering=0) as file:
        file.write(b"".join(map(line, range(count))))
    return count


def disk_bytes(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_a_punched_log_keeps_its_head_its_tail_and_its_size(tmp_path: Path):
    path = tmp_path / "0.0.out"
    count = write(path, 8 * MB)
    whole = path.read_bytes()
    result = bound(str(path), 4 * MB, head=MB)
    punched = path.read_bytes()
    assert result.trouble == ""
    assert result.freed >= 4 * MB
    assert disk_bytes(path) <= 4 * MB
    assert len(punched) == len(whole)
    assert punched[:MB] == whole[:MB]
    assert punched[-MB:] == whole[-MB:]
    assert punched.endswith(line(count - 1))


def test_a_log_within_its_bound_is_left_alone(tmp_path: Path):
    path = tmp_path / "0.0.out"
    write(path, 8 * MB)
    bound(str(path), 4 * MB, head=MB)
    before = path.read_bytes()
    assert bound(str(path), 4 * MB, head=MB).freed == 0
    assert path.read_bytes() == before


def test_a_log_that_does_not_exist_needs_no_bound(tmp_path: Path):
    result = bound(str(tmp_path / "none"), MB)
    assert (result.freed, result.trouble) == (0, "")


def test_a_path_that_cannot_be_bounded_is_reported(tmp_path: Path):
    assert "cannot be bounded" in bound(str(tmp_path), MB).trouble


@pytest.mark.parametrize("punches", [True, False])
def test_a_writer_goes_on_through_many_bounds(tmp_path: Path, punches: bool):
    """What the last bound left, and all that came after it, is whole lines in order."""
    path = tmp_path / "0.0.out"
    with path.open("ab", buffering=0) as writer:
        for round_ in range(10):
            writer.write(b"".join(map(line, range(round_ * 10_000, (round_ + 1) * 10_000))))
            bound(str(path), 2 * MB, head=256 * 1024, punches=punches)
            assert disk_bytes(path) <= 2 * MB + 4096
        writer.write(line(100_000))
    assert path.read_bytes().startswith(line(0))
    aside = Path(f"{path}.1")
    whole = (aside.read_bytes() if aside.exists() else b"") + path.read_bytes().rpartition(b"cut here ...\n")[2]
    numbers = [int(text) for text in whole.splitlines()[-300:]]
    assert numbers == list(range(100_000 - 299, 100_001))


def test_without_holes_the_tail_is_kept_beside_the_log(tmp_path: Path):
    path = tmp_path / "0.0.out"
    write(path, 8 * MB)
    whole = path.read_bytes()
    result = bound(str(path), 4 * MB, head=MB, punches=False)
    assert "holes are not supported" in result.trouble
    assert path.read_bytes().startswith(whole[:MB] + b"\n... 7 MB of this log were cut here ...")
    beside = Path(f"{path}.1").read_bytes()
    assert len(beside) >= MB
    assert whole.endswith(beside)
    assert result.freed > 4 * MB


def test_no_space_for_the_tail_is_reported_and_the_log_still_shrinks(tmp_path: Path):
    """A limit on file sizes stands in for a full disk."""
    path = tmp_path / "0.0.out"
    write(path, 8 * MB)
    script = f"""
import resource, signal
from argosy.supervise.output.logfile import bound
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({MB // 2}, {MB // 2}))
print(bound({str(path)!r}, {4 * MB}, head={MB // 4}, punches=False).trouble)
"""
    said = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True, env=os.environ
    ).stdout
    assert "its tail could not be kept" in said
    assert path.stat().st_size < MB
    assert not Path(f"{path}.1").exists()
    assert not Path(f"{path}.1.new").exists()


@pytest.mark.parametrize("punches", [True, False])
def test_a_reader_follows_through_the_cut(tmp_path: Path, punches: bool):
    path = tmp_path / "0.0.out"
    tail = Tail()
    tail.add(0, "stdout", str(path))
    write(path, 8 * MB)
    read = 0
    while chunks := tail.poll():
        read += sum(len(data) for _, _, data in chunks)
    assert read == path.stat().st_size
    bound(str(path), 4 * MB, head=MB, punches=punches)
    with path.open("ab", buffering=0) as file:
        file.write(b"after the cut\n")
    seen = b"".join(data for _, _, data in tail.poll())
    tail.close()
    assert seen.splitlines()[-1] == b"after the cut"
    assert len(seen) < 200
