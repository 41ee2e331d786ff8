"""Meshes in the test's own process, on daemons of their own."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from console import terminal, until

from argosy.fabric import here


@contextmanager
def owner(path: Path) -> Iterator[Path]:
    """Make this process the owner of meshes in `path`; afterwards nothing of them may be left."""
    names = ("ARGOSY_RUNTIME_DIR", "XDG_STATE_HOME", "XDG_CACHE_HOME")
    before, cwd = {name: os.environ.get(name) for name in names}, os.getcwd()
    with terminal(path) as console:
        try:
            os.environ.update({name: console.env[name] for name in names})
            os.chdir(path)
            here.cache_clear()
            yield console.runtime
        finally:
            os.chdir(cwd)
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            here.cache_clear()


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def until_gone(*pids: int) -> None:
    until(lambda: all(gone(pid) for pid in pids), f"the end of {pids}")
