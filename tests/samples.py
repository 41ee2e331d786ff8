"""Sources for the tests of loaders; worker processes import this, so it imports little."""

import os
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np


class Numbers:
    """Sample i is i; a file in `directory` named after it makes it misbehave once, by what the file says."""

    def __init__(self, length: int, directory: Path | None = None) -> None:
        self.length, self.directory = length, directory

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, Any]:
        path = self.directory and self.directory / str(index)
        if path and path.exists():
            text = path.read_text()
            if not text.startswith("always"):
                path.unlink()
            misbehave(text.removeprefix("always "), index)
        return index, np.random.rand(4)


def misbehave(how: str, index: int) -> None:
    match how:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            time.sleep(1000)
        case "exit":
            os._exit(3)
        case "fork":
            if os.fork() == 0:
                time.sleep(1)
                os._exit(0)
        case "fork and kill":  # The child keeps the worker's end of the link open.
            if os.fork() == 0:
                time.sleep(5)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        case _:
            raise OSError(f"cannot read {index}: {how}")


class Secretive(Numbers):
    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.lock = threading.Lock()


class Greedy(Numbers):
    """Sample 3 wants a GiB; if `limited`, its process may not have that much more than it has."""

    def __init__(self, length: int, *, limited: bool = False) -> None:
        super().__init__(length)
        self.limited = limited

    def __getitem__(self, index: int) -> tuple[int, Any]:
        if index == 3:
            if self.limited:
                pages = int(Path("/proc/self/statm").read_text().split()[0])
                limit = pages * resource.getpagesize() + (256 << 20)
                resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            return index, np.ones(1 << 27, np.float64)  # 1 GiB
        return super().__getitem__(index)


class Threaded(Numbers):
    """Starts a thread wherever it is unpickled."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()


class Leaving(Numbers):
    """One of its samples ends the interpreter."""

    def __getitem__(self, index: int) -> Any:
        if index == 3:
            raise SystemExit(7)
        return super().__getitem__(index)
