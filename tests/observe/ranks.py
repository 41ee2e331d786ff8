"""Run a script as several ranks of a Gloo group, each with its own progress page.

In fresh interpreters, as user scripts run, so that no hook leaks into the process of the tests.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from argosy.observe import Page, Progress

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"

PRELUDE = """
import os, sys, time
from argosy.observe import Page, install_when_imported
rank, size, directory = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
page = Page.create(f"{directory}/page{rank}")
install_when_imported(page)
import torch, torch.distributed as dist
torch.set_num_threads(1)
def form():
    dist.init_process_group("gloo", store=dist.FileStore(directory + "/store", size), rank=rank, world_size=size)
"""


def environment() -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": str(SOURCE),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "error",
    }


class Ranks:
    """`size` interpreters that run `body` after the prelude; killed at the end of the block."""

    def __init__(self, directory: Path, size: int, body: str) -> None:
        self.directory, self.size = directory, size
        script = directory / "script.py"
        script.write_text(PRELUDE + body)
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(script), str(rank), str(size), str(directory)],
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(size)
        ]

    def pages(self) -> dict[int, Progress]:
        """Return what the pages say now, of the ranks that have one."""
        found: dict[int, Progress] = {}
        for rank in range(self.size):
            path = self.directory / f"page{rank}"
            progress = Page.open(path).read() if path.exists() else None
            if progress is not None:
                found[rank] = progress
        return found

    def until(self, fact: Callable[[dict[int, Progress]], bool], seconds: float = 60) -> dict[int, Progress]:
        """Return the pages once `fact` holds for them."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            pages = self.pages()
            if fact(pages):
                return pages
            time.sleep(0.05)
        for process in self.processes:
            process.kill()
        outputs = [process.communicate()[0] for process in self.processes]
        raise AssertionError(f"never held: {self.pages()}; {outputs}")

    def outputs(self, seconds: float = 100) -> list[str]:
        """Return what each rank printed; all must end well."""
        outputs = [process.communicate(timeout=seconds)[0] for process in self.processes]
        assert [process.returncode for process in self.processes] == [0] * self.size, outputs
        return outputs

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.communicate()
