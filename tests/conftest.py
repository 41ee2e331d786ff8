"""Fixtures for all rooms."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from console import Console, ask_agent, cold_terminal, leave_shared_home, terminal, until
from daemons import desk

os.environ["ARGOSY_RECORD"] = "0"  # Runs in the tests' own process start no drain, and leave torch as it is.

# A shell ignores SIGINT and SIGQUIT for its background jobs, nohup ignores SIGHUP, and what they start would too: the
# signals are tested all the same.
for number, usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)


def pytest_sessionfinish() -> None:
    leave_shared_home()


ROOMS = ["journeys", "examples", "train", "collective", "checkpoint", "supervise", "actors", "data", "cli"]
"""Where tests take long: they begin first, so that workers end together."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        room = item.path.parent.name
        return ROOMS.index(room) if room in ROOMS else len(ROOMS)

    items.sort(key=place)


@pytest.fixture
def console(tmp_path: Path) -> Iterator[Console]:
    """A terminal in an empty directory, on the daemons of all tests of this worker."""
    with terminal(tmp_path) as opened:
        yield opened


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Console]:
    """As `console`, with daemons that are up and a script that waits; nothing of a run may be left in the end."""
    with terminal(tmp_path) as opened:
        assert ask_agent(opened) or opened.argosy("run", "--", "true").code == 0
        yield desk(opened, tmp_path)


@pytest.fixture
def cold_console(tmp_path: Path) -> Iterator[Console]:
    """A terminal in an empty directory, with daemons of its own."""
    with cold_terminal(tmp_path) as opened:
        yield opened


PARENTS = [Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")]
LIMITS = ["memory.limit_in_bytes", "memory.max"]


@pytest.fixture
def small_memory() -> Iterator[Path]:
    """A cgroup with 400 MB, of version 1 or 2."""
    for parent, limit in zip(PARENTS, LIMITS, strict=True):
        group = parent / f"argosy-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        if (group / limit).exists():
            (group / limit).write_text(str(400 << 20))
            with suppress(OSError):  # So that nothing is saved by swapping.
                (group / "memory.swap.max").write_text("0")
            yield group
            until(lambda group=group: removed(group), "an empty cgroup", 200.0)
            return
        group.rmdir()
    pytest.skip("no cgroup with a limit of memory can be made here")


def removed(group: Path) -> bool:
    with suppress(OSError):
        group.rmdir()
    return not group.exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 KB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(words, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("mounting a small disk is not allowed here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)
