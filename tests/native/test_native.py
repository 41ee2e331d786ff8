"""The Rust extension, its stub and its Python reference offer the same functions and answers."""

import ast
import ctypes
import errno
import importlib
import inspect
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import argosy
from argosy import _reference
from argosy._select import native, native_is_compiled

PACKAGE = Path(argosy.__file__).parent
BUILT = sorted(PACKAGE.glob("_native*.so"))
MODULES = ["argosy._reference"] + ["argosy._native"] * bool(BUILT)
NOT_OPEN = 1 << 29
"""A descriptor beyond what any process can open."""

pytestmark = pytest.mark.native


@pytest.fixture(params=MODULES)
def module(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(request.param)


def public_functions(module: ModuleType) -> dict[str, list[str]]:
    """Names of the functions that `module` itself defines, with the names of their parameters."""
    return {
        name: list(inspect.signature(value).parameters)
        for name, value in vars(module).items()
        if not name.startswith("_")
        and inspect.isroutine(value)
        and getattr(value, "__module__", None) in (module.__name__, "_native", None)
    }


def declared(path: Path) -> dict[str, tuple[str, str | None]]:
    """Signature and docstring of each public function in a source file."""
    return {
        node.name: (
            f"({ast.unparse(node.args)}) -> {ast.unparse(node.returns or ast.Constant(None))}",
            ast.get_docstring(node),
        )
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    }


def test_the_stub_and_the_reference_declare_the_same():
    assert declared(PACKAGE / "_native.pyi") == declared(PACKAGE / "_reference.py")


@pytest.mark.skipif(not BUILT, reason="the extension is not built")
def test_the_extension_has_what_the_stub_declares():
    extension = importlib.import_module("argosy._native")
    assert public_functions(extension) == public_functions(_reference)
    for name, (_, docstring) in declared(PACKAGE / "_native.pyi").items():
        assert inspect.getdoc(getattr(extension, name)) == docstring


def test_argosy_native_0_selects_the_reference():
    wanted = bool(BUILT) and os.environ.get("ARGOSY_NATIVE") != "0"
    assert native_is_compiled is wanted
    assert native.__name__ == ("argosy._native" if wanted else "argosy._reference")
    program = "from argosy._select import native as n, native_is_compiled as c; print(n.__name__, c)"
    chosen = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "ARGOSY_NATIVE": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert chosen.stdout.split() == ["argosy._reference", "False"]


def test_a_punched_file_keeps_its_size_head_and_tail(module: ModuleType, tmp_path: Path):
    path = tmp_path / "log"
    mebi = 1 << 20
    path.write_bytes(b"h" * mebi + b"m" * 2 * mebi + b"t" * mebi)
    blocks = path.stat().st_blocks
    with path.open("r+b") as file:
        assert module.punch_hole(file.fileno(), mebi, 2 * mebi) is None
    assert path.read_bytes() == b"h" * mebi + bytes(2 * mebi) + b"t" * mebi
    assert path.stat().st_blocks < blocks


def test_bad_arguments_give_the_error_of_the_kernel(module: ModuleType, tmp_path: Path):
    with (tmp_path / "log").open("w+b") as file, pytest.raises(OSError, match="Invalid argument") as caught:
        module.punch_hole(file.fileno(), 0, 0)
    assert caught.value.errno == errno.EINVAL
    with pytest.raises(OSError, match="Bad file descriptor") as caught:
        module.punch_hole(NOT_OPEN, 0, 1)
    assert caught.value.errno == errno.EBADF
    with pytest.raises(OSError, match="Bad file descriptor") as caught:
        module.pidfd_exit_status(NOT_OPEN)
    assert caught.value.errno == errno.EBADF


# A process whose parent is another than the test, so that the test could not wait for it.
PARENT = """
import os, signal, sys
pid = os.fork()
if pid == 0:
    sys.stdin.close()
    exec(sys.argv[1])
print(pid, flush=True)
sys.stdin.readline()
os.kill(pid, signal.SIGCONT)
os.waitpid(pid, 0)
print("reaped", flush=True)
sys.stdin.readline()
"""


@contextmanager
def reaped_by_somebody_else(how_it_ends: str) -> Iterator[int]:
    """A pidfd, opened while the process lived, of one that its parent has reaped since."""
    command = [sys.executable, "-c", PARENT, f"signal.raise_signal(signal.SIGSTOP); {how_it_ends}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin
        assert parent.stdout
        pid = int(parent.stdout.readline())
        pidfd = os.pidfd_open(pid)
        try:
            # The child may not have stopped yet when it is told to go on; then it would stop for good.
            while "T" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]:
                select.select([], [], [], 0.01)
            assert native.pidfd_exit_status(pidfd) is None
            parent.stdin.write("\n")
            parent.stdin.flush()
            assert parent.stdout.readline() == "reaped\n"
            yield pidfd
        finally:
            os.close(pidfd)
            parent.kill()


def kernel() -> tuple[int, int]:
    major, minor = os.uname().release.split(".")[:2]
    return int(major), int(minor)


@pytest.mark.skipif(kernel() < (6, 15), reason="kernels before 6.15 forget the status of a reaped process")
@pytest.mark.parametrize(
    ("how_it_ends", "code", "signal_number"),
    [
        ("os._exit(0)", 0, None),
        ("os._exit(42)", 42, None),
        ("os.kill(os.getpid(), signal.SIGKILL)", None, signal.SIGKILL),
        ("signal.raise_signal(signal.SIGTERM)", None, signal.SIGTERM),
    ],
)
def test_a_pidfd_tells_how_a_process_ended_that_another_reaped(
    module: ModuleType, how_it_ends: str, code: int | None, signal_number: int | None
):
    with reaped_by_somebody_else(how_it_ends) as pidfd:
        status = module.pidfd_exit_status(pidfd)
    assert isinstance(status, int)
    if signal_number is None:
        assert os.WIFEXITED(status)
        assert os.WEXITSTATUS(status) == code
    else:
        assert os.WTERMSIG(status) == signal_number


def test_a_running_process_has_no_status(module: ModuleType):
    pidfd = os.pidfd_open(os.getpid())
    try:
        assert module.pidfd_exit_status(pidfd) is None
    finally:
        os.close(pidfd)


def test_a_file_is_no_pidfd(module: ModuleType, tmp_path: Path):
    with (tmp_path / "file").open("wb") as file:
        assert module.pidfd_exit_status(file.fileno()) is None


@pytest.mark.parametrize(
    ("element", "kind", "finite", "not_finite"),
    [
        (0, "u4", [0, 0x80000000, 0x7F7FFFFF, 0xFF7FFFFF, 1], [0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001]),
        (1, "u8", [0, 0x7FEFFFFFFFFFFFFF, 1 << 63], [0x7FF0000000000000, 0xFFF0000000000000, 0x7FF0000000000001]),
        (2, "u2", [0, 0x7BFF, 0xFBFF, 0x8001], [0x7C00, 0xFC00, 0x7E00, 0xFC01]),
        (3, "u2", [0, 0x7F7F, 0xFF7F, 0x8001], [0x7F80, 0xFF80, 0x7FC0, 0xFF81]),
    ],
)
def test_a_number_that_is_not_finite_is_found(
    module: ModuleType, element: int, kind: str, finite: list[int], not_finite: list[int]
):
    words = np.resize(np.array(finite, kind), 20_011)
    parts = [(words.ctypes.data, 0), (words.ctypes.data, words.nbytes)]
    assert module.are_finite(parts, element)
    for place in (0, 8191, 8192, 20_010):
        for word in not_finite:
            was, words[place] = words[place], word
            assert not module.are_finite(parts, element)
            words[place] = was
    with pytest.raises(ValueError, match="a part of an element"):
        module.are_finite([(words.ctypes.data, 3)], element)
    with pytest.raises(ValueError, match="no such floating point element"):
        module.are_finite(parts, 4)


def test_a_span_record_is_the_same_from_both(module: ModuleType):
    """Header: capacity 4 in word 2, records so far in word 3; then records of four words."""
    memory = bytearray(4096 + 4 * 32)
    words = memoryview(memory).cast("Q")
    words[2] = 4
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    before = time.monotonic_ns()
    for number in range(6):
        module.record_span(address, number | 2 << 32, 2**64 - 1 - number, 7)
    assert words[3] == 6
    for number in range(2, 6):
        at = 512 + number % 4 * 4
        assert before <= words[at] <= time.monotonic_ns()
        assert words[at + 1] & 0xFF_FFFF_FFFF == number | 2 << 32
        assert words[at + 2] == 2**64 - 1 - number
        assert words[at + 3] == number + 1 | 7 << 32
