"""The memory of other processes: written and read as by the reference, and errors keep their number."""

import errno
import importlib
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import argosy

BUILT = sorted(Path(argosy.__file__).parent.glob("_native*.so"))
MODULES = ["argosy._reference"] + ["argosy._native"] * bool(BUILT)
HOLDER = """
import ctypes, sys
memory = ctypes.create_string_buffer(100_016)
memory[100_000] = 1
print(ctypes.addressof(memory), flush=True)
sys.stdin.readline()
sys.stdout.buffer.write(memory.raw[:100_000])
"""
COUNT = np.zeros(1, np.uint64)


@pytest.fixture(params=MODULES)
def module(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(request.param)


@pytest.fixture
def other() -> Iterator[tuple[subprocess.Popen[bytes], int, int]]:
    """Another process with 100,000 zeros: itself, its descriptor, where they are."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    pidfd = os.pidfd_open(process.pid)
    yield process, pidfd, int(process.stdout.readline())
    os.close(pidfd)
    process.kill()
    process.communicate()


def way(other: tuple[subprocess.Popen[bytes], int, int]) -> tuple[int, int, int, int]:
    """Into the other process, whose gate is behind its bytes."""
    return other[0].pid, other[1], other[2] + 100_000, COUNT.ctypes.data


def packed(*rows: tuple[int, ...]) -> bytes:
    return b"".join(struct.pack(f"<{len(row)}q", *row) for row in rows)


def test_boxes_go_into_another_process(module: ModuleType, other: tuple[subprocess.Popen[bytes], int, int]):
    process, _, address = other
    own = np.random.default_rng(0).integers(0, 256, (100, 900), np.uint8)
    # Two columns of runs, 30 and 17 bytes, of every row; more of them than the kernel takes at a time.
    strided = (own.ctypes.data, address, 0, 17, 100, 10, 1, 900, 90, 0, 400, 40, 0, 0, 0, 0)
    plain = (own.ctypes.data, address + 50_000, 0, 5_000, 1, 1, 1, *[0] * 9)
    module.write_memory(packed((*way(other), *strided), (*way(other), *plain)))
    wanted = np.zeros(100_000, np.uint8)
    for row in range(100):
        for column in range(10):
            at = 400 * row + 40 * column
            wanted[at : at + 17] = own[row, 90 * column : 90 * column + 17]
    wanted[50_000:55_000] = own.reshape(-1)[:5_000]
    assert module.read_memory(process.pid, address, 100_000) == wanted.tobytes()
    assert process.communicate(b"\n", timeout=30)[0] == wanted.tobytes()


def test_what_is_read_from_a_file_goes_there_too(
    module: ModuleType, other: tuple[subprocess.Popen[bytes], int, int], tmp_path: Path
):
    process, _, address = other
    data = np.random.default_rng(1).bytes(20_000)
    (tmp_path / "file").write_bytes(data)
    jobs = packed((100, 0, 0, 8_000, 1, 1, 1, *[0] * 9))
    sends = packed((*way(other), 100, address, 0, 8_000, 1, 1, 1, *[0] * 9))
    with (tmp_path / "file").open("rb") as file:
        reads = packed(
            (file.fileno(), 4_096, 8_192, 8_100, 0, 1, 0, 1), (file.fileno(), 16_384, 8_192, 8_192, 0, 1, 0, 1)
        )
        module.read_files(reads, jobs, sends, 2)  # The second read is short: it sends nothing.
    assert module.read_memory(process.pid, address, 8_001) == data[4_196:12_196] + b"\0"


def test_a_process_that_ended_and_memory_that_is_not_there_are_errors(
    module: ModuleType, other: tuple[subprocess.Popen[bytes], int, int]
):
    process, _, address = other
    own = np.ones(100, np.uint8)

    def row(to: int) -> bytes:
        return packed((*way(other), own.ctypes.data, to, 0, 100, 1, 1, 1, *[0] * 9))

    for call in (lambda: module.write_memory(row(4_096)), lambda: module.read_memory(process.pid, 4_096, 8)):
        with pytest.raises(OSError, match="Bad address") as caught:
            call()
        assert caught.value.errno == errno.EFAULT
    with pytest.raises(ValueError, match="bytes"):
        module.write_memory(b"12345")
    # It closes its gate.
    gate = np.array([2], np.uint64)
    module.write_memory(packed((*way(other), gate.ctypes.data, address + 100_000, 0, 8, 1, 1, 1, *[0] * 9)))
    with pytest.raises(OSError, match="cancel") as caught:
        module.write_memory(row(address))
    assert caught.value.errno == errno.ECANCELED
    assert module.read_memory(process.pid, address, 100) == bytes(100)
    assert COUNT[0] == 0
    process.kill()
    process.wait()
    with pytest.raises(ProcessLookupError) as caught:
        module.write_memory(row(address))
    assert caught.value.errno == errno.ESRCH
