"""Run a script as several ranks of a Gloo group, each with its own progress page.

One process that has torch installs the hooks and forks the ranks, as a warm launcher does; so no hook leaks into the
process of the tests. The script knows `rank`, `size`, `page`, `torch`, `dist`, `form()`.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from warm import warm

from argosy.observe import Page, RankProgress

SOURCE = Path(__file__).parents[2] / "src"

_PARENT = """
import os, pathlib, sys, time
import torch, torch.distributed as dist
from argosy.observe import Page, attach, install
directory, size = sys.argv[1], int(sys.argv[2])
install()

def form():
    store = dist.FileStore(directory + "/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)

children = []
for rank in range(size):
    pid = os.fork()
    if pid:
        children.append(pid)
        continue
    torch.set_num_threads(1)
    page = Page.create(f"{directory}/page{rank}")
    attach(page)
    out = os.open(f"{directory}/out{rank}", os.O_CREAT | os.O_WRONLY, 0o600)
    os.dup2(out, 1), os.dup2(out, 2)
    exec(compile(pathlib.Path(directory, "script.py").read_text(), "script.py", "exec"))
    sys.stdout.flush()
    os._exit(0)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children))
"""


def environment() -> dict[str, str]:
    """The environment of a child in which every warning is an error and Gloo keeps to loopback."""
    return os.environ | {
        "PYTHONPATH": str(SOURCE),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "error",
    }


def run_script(text: str, *args: str, has_torch: bool = True) -> str:
    """Run a script in a process that has torch, or in a fresh one; return what it printed. It must end well."""
    python = warm() if has_torch else [sys.executable]
    done = subprocess.run([*python, "-c", text, *args], env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


class Ranks:
    """`size` forked ranks that run `script`; none is left at the end of the block."""

    def __init__(self, directory: Path, size: int, script: str) -> None:
        self.directory, self.size = directory, size
        (directory / "script.py").write_text(script)
        self.parent = subprocess.Popen([*warm(), "-c", _PARENT, str(directory), str(size)], env=environment())

    def pages(self) -> dict[int, RankProgress]:
        """Return what the pages say now, of the ranks that have one."""
        found: dict[int, RankProgress] = {}
        for rank in range(self.size):
            with contextlib.suppress(OSError):  # Not there yet, or just being made.
                if (progress := Page.open(self.directory / f"page{rank}").read()) is not None:
                    found[rank] = progress
        return found

    def until(self, fact: Callable[[dict[int, RankProgress]], bool]) -> dict[int, RankProgress]:
        """Return the pages once all ranks have one and `fact` holds for them."""
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and self.parent.poll() is None:
            pages = self.pages()
            if len(pages) == self.size and fact(pages):
                return pages
            time.sleep(0.05)
        raise AssertionError(f"never held: {self.pages()}; {self._outputs()}")

    def outputs(self) -> list[str]:
        """Wait for the end and return what each rank printed; all must end well."""
        assert self.parent.wait(timeout=300) == 0, self._outputs()
        return self._outputs()

    def _outputs(self) -> list[str]:
        return [path.read_text() for path in sorted(self.directory.glob("out*"))]

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self.parent.kill()  # The ranks with it.
        self.parent.wait()
