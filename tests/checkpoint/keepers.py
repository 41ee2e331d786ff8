"""Runs with keepers, what those hold, and their end."""

import json
import mmap
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from checkpoint.trainings import Training

import argosy
from argosy.checkpoint import Keeping
from argosy.checkpoint.keeper.life import Life, known_keepers
from argosy.checkpoint.keeper.messages import Kept, Take, keeper_decoder
from argosy.checkpoint.keeper.source import keeper_sources
from argosy.checkpoint.owner import OWNER
from argosy.fabric import connect


@dataclass
class Run:
    """A run's directory of checkpoints, and the record whose life its keepers share."""

    directory: Path
    home: Path
    record: Path

    @property
    def life(self) -> Life:
        return Life(self.record.name, str(self.record), 1, str(self.record / "agent"))

    def train(self, **env: str) -> Training:
        return Training(self.directory, self.keeping(), **self.places(), **env)

    def keeping(self, **options: object) -> Keeping:
        return Keeping(life=self.life, **options)

    def state(self, state: str) -> None:
        (self.record / "run.json").write_text(json.dumps({"launch": 1, "state": state}))

    def places(self) -> dict[str, str]:
        paths = {"PYTHONPATH": str(Path(argosy.__file__).parents[1]), "ARGOSY_RUNTIME_DIR": str(self.home)}
        return paths | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}

    def keepers(self) -> list[psutil.Process]:
        """The living keepers that listen in this home."""
        found: list[psutil.Process] = []
        for entry in os.scandir("/proc"):
            with suppress(OSError, psutil.NoSuchProcess):
                line = Path(entry.path, "cmdline").read_text().rstrip("\0 ") if entry.name.isdigit() else ""
                if line.startswith("argosy: keeper of ") and f" at {self.home}/" in line:
                    found.append(psutil.Process(int(entry.name)))
        return found


@contextmanager
def a_run(directory: Path) -> Iterator[Run]:
    """A run whose keepers end with this block."""
    with tempfile.TemporaryDirectory(prefix="argosy-") as home, tempfile.TemporaryDirectory() as record:
        run = Run(directory, Path(home), Path(record))
        run.state("running")
        with socket.socket(socket.AF_UNIX) as agent:
            agent.bind(f"{record}/agent")
            agent.listen(1000)
            try:
                yield run
            finally:
                run.state("ended")
                deadline = time.monotonic() + 300
                for keeper in run.keepers():
                    with suppress(psutil.NoSuchProcess):
                        keeper.resume()  # A test that failed may have left it stopped.
                while run.keepers() and time.monotonic() < deadline:
                    time.sleep(0.02)
                assert run.keepers() == [], "a keeper outlived its run"
        for path in Path(home).iterdir():  # Logs of keepers that were killed.
            print(path.name, path.read_text() if path.suffix == ".log" else "")
            path.unlink()


def wait_for(ready: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 300
    while not ready():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def remove(directory: Path) -> None:
    """Remove a directory as a user would, also while its keeper removes files of its own."""
    subprocess.run(["rm", "-rf", str(directory)], check=True)


def until_left(run: Run) -> None:
    """Wait until the keeper has let go of the directory, after the last saver was closed."""
    wait_for(lambda: not (run.directory / "checkpoints" / OWNER).exists(), "a directory that nobody owns")


def holdings(run: Run) -> list[int]:
    """The steps that the keeper holds whole, newest first."""
    found: list[int] = []
    for source in keeper_sources(str(run.directory)):
        found += [each.step for each in source.candidates()]
        source.close()
    return found


def flip(run: Run, offset: int, *, draft: bool = False) -> None:
    """Turn a bit in the memory that a keeper holds of its newest version: in the arena or in the draft."""
    (source,) = keeper_sources(str(run.directory))
    name = source.candidates()[0].name
    source.close()
    (path,) = known_keepers(str(run.directory))
    link = connect(path, keeper_decoder, "the keeper")
    link.send(Take(name))
    message, fds = link.wait(300.0)
    assert isinstance(message, Kept)
    with mmap.mmap(fds[draft], os.fstat(fds[draft]).st_size) as memory:
        memory[offset] ^= 16
    for fd in fds:
        os.close(fd)
    link.close()
