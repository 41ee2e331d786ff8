"""What `argosy doctor` says about machines that are well and machines that are not."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
import pytest
from console import REPOSITORY

from argosy.cli import doctor_measure
from argosy.cli.commands import cli
from argosy.cli.doctor_judge import Check, Measured, judge_machine

GB = 1 << 30
WELL = Measured(
    python="3.12.1 at /usr/bin/python",
    native="compiled",
    torch="2.15.0+cpu",
    torch_import_s=1.5,
    py_spy="/usr/bin/py-spy",
    cgroup=True,
    shm_bytes=8 * GB,
    shm_free=8 * GB,
    runtime="/tmp/argosy-1000/local-1",
    runtime_file_system="ext4",
    descriptors=1024,
    descriptors_hard=4096,
    pids=None,
    pidfd_exit=True,
    ptrace_scope=0,
    may_trace=False,
    host="h",
    lookup_s=0.001,
    cores=8,
    omp_threads=None,
    runs="/home/u/runs",
    disk_bytes=500 * GB,
    disk_free=100 * GB,
    leftovers=0,
)


def judge(**changes: object) -> list[Check]:
    """The lines that are not ok after these changes."""
    seen = msgspec.structs.replace(WELL, **changes)
    return [check for check in judge_machine(seen) if check.state != "ok"]


def test_a_machine_that_is_well_has_nothing_to_do():
    assert judge() == []
    assert [check.hint for check in judge_machine(WELL)] == [""] * len(judge_machine(WELL))


@pytest.mark.parametrize(
    ("changes", "name", "state"),
    [
        ({"native": "reference"}, "native code", "warn"),
        ({"native_error": "undefined symbol"}, "native code", "fail"),
        ({"torch": None}, "torch", "warn"),
        ({"torch": "2.12.1"}, "torch", "warn"),
        ({"torch": "2.16.0a0"}, "torch", "warn"),
        ({"torch_error": "ImportError: libcudart"}, "torch", "fail"),
        ({"py_spy": None}, "py-spy", "warn"),
        ({"cgroup": False}, "cgroups", "warn"),
        ({"pidfd_exit": False}, "exit codes", "warn"),
        ({"ptrace_scope": 1}, "ptrace", "warn"),
        ({"descriptors": 256}, "open files", "warn"),
        ({"descriptors": 32}, "open files", "fail"),
        ({"pids": 512}, "processes", "warn"),
        ({"pids": 10}, "processes", "fail"),
        ({"runtime_error": "it is not yours: /tmp/argosy-1000"}, "runtime dir", "fail"),
        ({"runtime_file_system": "nfs4"}, "runtime dir", "fail"),
        ({"shm_free": 64 << 20}, "/dev/shm", "warn"),
        ({"shm_free": 0}, "/dev/shm", "fail"),
        ({"disk_free": GB}, "disk", "warn"),
        ({"disk_free": 0}, "disk", "fail"),
        ({"loopback_error": "the interface lo is down"}, "loopback", "fail"),
        ({"lookup_s": None}, "name lookup", "warn"),
        ({"lookup_s": 1.5}, "name lookup", "warn"),
        ({"omp_threads": "64"}, "cores", "warn"),
        ({"leftovers": 2}, "leftovers", "warn"),
    ],
)
def test_what_is_amiss_is_one_line_that_says_what_to_do(changes: dict[str, object], name: str, state: str):
    (check,) = judge(**changes)
    assert (check.name, check.state) == (name, state)
    assert check.hint


@pytest.mark.parametrize(
    "changes",
    [
        {"native": "skipped"},
        {"torch": "2.15.9+cu130"},
        {"ptrace_scope": 1, "may_trace": True},
        {"ptrace_scope": None},
        {"runtime_file_system": "tmpfs"},
        {"omp_threads": "1"},
        {"pids": 32768},
    ],
)
def test_what_is_chosen_or_enough_is_ok(changes: dict[str, object]):
    assert judge(**changes) == []


@pytest.fixture
def world() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="d-") as name:
        (Path(name) / "shm").mkdir()
        yield Path(name)


def doctor(world: Path, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "ARGOSY_RUNTIME_DIR": str(world / "rt"),
        "ARGOSY_SHM_DIR": str(world / "shm"),
        "XDG_STATE_HOME": str(world / "state"),
        "XDG_CACHE_HOME": str(world / "cache"),
        **variables,
    }
    command = [sys.executable, "-m", "argosy", "doctor", *args]
    return subprocess.run(command, cwd=world, env=environment, capture_output=True, text=True)


def test_this_machine_is_looked_at_and_nothing_is_left(world: Path):
    done = doctor(world, "--json")
    checks = msgspec.convert(json.loads(done.stdout), list[Check])
    assert done.returncode == (1 if any(check.state == "fail" for check in checks) else 0)
    assert [check.name for check in checks] == [check.name for check in judge_machine(WELL)]
    assert next(check for check in checks if check.name == "runtime dir").state == "ok"
    assert os.listdir(world) == ["shm"]
    assert os.listdir(world / "shm") == []


def test_a_file_of_the_user_in_the_working_directory_is_no_fault_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "queue.py").write_text("raise RuntimeError('mine')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor_measure, "_TIMED_IMPORT", "import queue; print('2.15.0', 0.1)")
    assert doctor_measure._try_torch()[1:] == (0.1, "")


def test_a_failure_sets_the_exit_code(world: Path):
    done = doctor(world, ARGOSY_RUNTIME_DIR=str(world / ("long" * 40)))
    assert done.returncode == 1
    assert "fail  runtime dir" in done.stdout


def test_every_package_that_is_suggested_is_one_that_argosy_depends_on():
    """Argosy itself is not on PyPI."""
    declared = (REPOSITORY / "pyproject.toml").read_text()
    texts = [*(REPOSITORY / "src").rglob("*.py"), *(REPOSITORY / "docs").glob("*.md")]
    suggested = {name for path in texts for name in re.findall(r"pip install '?([\w-]+)", path.read_text())}
    assert {"torch", "py-spy", "obstore", "duckdb"} <= suggested
    assert "argosy" not in suggested
    assert {name for name in suggested if f'"{name}' not in declared} == set()


def test_every_option_that_a_message_recommends_exists():
    recommended = [
        (path.name, *found)
        for path in (REPOSITORY / "src").rglob("*.py")
        for found in re.findall(r"argosy ([a-z]+) [^`'\"\n.;,]*?(--[a-z][a-z-]*)", path.read_text())
    ]
    assert len(recommended) > 3
    for path, name, option in recommended:
        if (command := cli.get_command(click.Context(cli), name)) is not None:
            options = {text for parameter in command.params for text in parameter.opts}
            if not isinstance(command, click.Group):
                assert option in options, f"{path}: argosy {name} {option}"
