"""Files read and written by native threads: the same as the reference in Python, and errors keep their number."""

import errno
import importlib
import os
import random
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import argosy
from argosy import _reference

BUILT = sorted(Path(argosy.__file__).parent.glob("_native*.so"))
MODULES = ["argosy._reference"] + ["argosy._native"] * bool(BUILT)


@pytest.fixture(params=MODULES)
def module(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(request.param)


def packed(*rows: tuple[int, ...]) -> bytes:
    return b"".join(struct.pack(f"<{len(row)}q", *row) for row in rows)


def job(source: int, destination: int, length: int, logical: int = 0) -> tuple[int, ...]:
    return (source, destination, logical, length, 1, 1, 1, *[0] * 9)


def test_what_is_written_is_there(module: ModuleType, tmp_path: Path):
    data = np.frombuffer(random.Random(0).randbytes(50_000), np.uint8)
    with (tmp_path / "file").open("wb+") as file:
        rows = [(file.fileno(), data.ctypes.data + at, at, min(7_000, 50_000 - at)) for at in range(0, 50_000, 7_000)]
        module.write_files(packed(*rows), 3)
    assert (tmp_path / "file").read_bytes() == data.tobytes()


def test_what_is_read_is_copied_and_summed(module: ModuleType, tmp_path: Path):
    data = random.Random(1).randbytes(20_000)
    path = tmp_path / "file"
    path.write_bytes(data)
    into = np.zeros(20_000, np.uint8)
    jobs = [job(4, into.ctypes.data, 4_000, 4), job(4_004, 0, 90, 8), job(0, into.ctypes.data + 9_000, 1_000)]
    with path.open("rb") as file:
        reads = [(file.fileno(), 0, 8_192, 8_000, 0, 2), (file.fileno(), 16_384, 8_192, 1_000, 2, 1)]
        answer = module.read_files(packed(*reads), packed(*jobs), 2)
        short = module.read_files(packed((file.fileno(), 16_384, 8_192, 8_000, 0, 1)), packed(jobs[0]), 1)
    assert struct.unpack("<2q", answer[:16]) == (8_192, 20_000 - 16_384)
    assert into[:4_000].tobytes() == data[4:4_004]
    assert into[9_000:10_000].tobytes() == data[16_384:17_384]
    again = np.frombuffer(data, np.uint8)
    base = again.ctypes.data
    wanted = [job(base + 4, 0, 4_000, 4), job(base + 4_004, 0, 90, 8), job(base + 16_384, 0, 1_000)]
    assert answer[16:] == _reference.copy_digest(packed(*wanted), 1, 0)
    assert short == struct.pack("<q", 20_000 - 16_384) + bytes(16)


@pytest.mark.parametrize("threads", [1, 3])
def test_progress_counts_what_is_complete(module: ModuleType, threads: int):
    data = np.frombuffer(random.Random(2).randbytes(1 << 21), np.uint8)
    into, done = np.zeros(1 << 21, np.uint8), np.zeros(1, np.uint64)
    half = 1 << 20
    rows = packed(*(job(data.ctypes.data + at, into.ctypes.data + at, half, at) for at in (0, half)))
    answer = module.copy_digest(rows, threads, done.ctypes.data)
    assert done[0] == 2
    assert into.tobytes() == data.tobytes()
    assert answer == module.copy_digest(rows, threads, 0)


def test_errors_keep_their_number(module: ModuleType, tmp_path: Path):
    data = np.zeros(8_192, np.uint8)
    with pytest.raises(OSError, match="Bad file descriptor") as caught:
        module.write_files(packed((1 << 29, data.ctypes.data, 0, 8_192)), 2)
    assert caught.value.errno == errno.EBADF
    full = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(OSError, match="No space left") as caught:
        module.write_files(packed((full, data.ctypes.data, 0, 8_192)), 2)
    assert caught.value.errno == errno.ENOSPC
    os.close(full)
    with pytest.raises(OSError, match="Bad file descriptor"):
        module.read_files(packed((1 << 29, 0, 4_096, 1, 0, 0)), b"", 1)
    with pytest.raises(ValueError, match="jobs that do not exist"):
        module.read_files(packed((0, 0, 4_096, 1, 0, 1)), b"", 1)
    with pytest.raises(ValueError, match="a record has 32 bytes"):
        module.write_files(b"12345", 1)


WITHOUT_THREADS = """
import resource, struct, sys
import numpy as np
from argosy import _native, _reference

data = np.random.default_rng(0).integers(0, 255, 4 << 20, np.uint8)
copy = np.zeros_like(data)
step = 1 << 20
rows = [(data.ctypes.data + at, copy.ctypes.data + at, at, step, 1, 1, 1, *[0] * 9) for at in range(0, len(data), step)]
table = b"".join(struct.pack("<16q", *row) for row in rows)
expected = _reference.copy_digest(table, 1, 0)
copy[:] = 0
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
with open(sys.argv[1], "wb") as file:
    writes = [(file.fileno(), data.ctypes.data + at, at, step) for at in range(0, len(data), step)]
    places = b"".join(struct.pack("<4q", *row) for row in writes)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 20), hard))
    found = _native.copy_digest(table, 4, 0)
    _native.write_files(places, 4)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
assert found == expected
assert np.array_equal(copy, data)
assert open(sys.argv[1], "rb").read() == data.tobytes()
"""


@pytest.mark.skipif(not BUILT, reason="the Rust extension is not built")
def test_where_the_system_has_no_thread_to_give_one_does_it_all(tmp_path: Path):
    command = [sys.executable, "-c", WITHOUT_THREADS, str(tmp_path / "file")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
