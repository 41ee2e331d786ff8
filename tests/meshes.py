"""Meshes in the test's own process."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from console import terminal, until

from argosy.fabric import here


@contextmanager
def owner(path: Path) -> Iterator[Path]:
    """Make this process the owner of meshes in `path`; afterwards nothing of them may be left."""
    with terminal(path) as console, pytest.MonkeyPatch.context() as patch:
        for name in ("ARGOSY_RUNTIME_DIR", "XDG_STATE_HOME", "XDG_CACHE_HOME"):
            patch.setenv(name, console.env[name])
        patch.delenv("ARGOSY_LINGER_S", raising=False)  # The daemons stay for the next mesh.
        patch.chdir(path)
        here.cache_clear()
        try:
            yield console.runtime
        finally:
            here.cache_clear()


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def until_gone(*pids: int) -> None:
    until(lambda: all(gone(pid) for pid in pids), f"the end of {pids}")
