"""One process of a host does some work while the others wait for its result on disk."""

import contextlib
import fcntl
import time
from collections.abc import Generator
from pathlib import Path

PATIENCE_S = 900.0
POLL_S = 0.05


@contextlib.contextmanager
def locked(path: Path, patience_s: float = PATIENCE_S) -> Generator[None]:
    """Hold the lock of a file; after `patience_s` go ahead without it, as the work may be done twice but not never.

    The lock of a process that dies is free at once.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + patience_s
    with open(path, "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    break
                time.sleep(POLL_S)
        yield
