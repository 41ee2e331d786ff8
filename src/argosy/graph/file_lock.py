"""One process of a host does some work while the others wait for its result on disk."""

import contextlib
import fcntl
import time
from collections.abc import Generator
from pathlib import Path
from typing import TextIO

PATIENCE_S = 900.0
POLL_S = 0.05


@contextlib.contextmanager
def locked(path: Path, patience_s: float = PATIENCE_S) -> Generator[None]:
    """Hold the lock of a file; after `patience_s` go ahead without it, as the work may be done twice but not never.

    The lock of a process that dies is free at once.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # A cache that cannot be written to is no reason not to work.
            path.parent.mkdir(parents=True, exist_ok=True)
            wait_for(stack.enter_context(open(path, "w")), time.monotonic() + patience_s)
        yield


def wait_for(file: TextIO, end: float) -> None:
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                return
            time.sleep(POLL_S)
