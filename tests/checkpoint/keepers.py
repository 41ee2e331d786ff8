"""Trainings with a keeper, in processes of their own, and the keepers' end."""

import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

import argosy
from argosy.checkpoint import Keeping, Restored
from argosy.checkpoint.keeper.life import OfProcess, known_keepers
from argosy.checkpoint.keeper.messages import Kept, Take, keeper_decoder
from argosy.checkpoint.keeper.source import keeper_sources
from argosy.fabric import connect

CELLS = 300_001
TRAINING = f"""
import os, sys
import numpy as np
from argosy.checkpoint import Keeping, KeepLast, Saver, StepNotFound, restore
from argosy.checkpoint.keeper.life import OfProcess
directory, pid, begun, peer = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4] == "peer"
rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if size > 1:
    import torch.distributed as dist
    dist.init_process_group("gloo", store=dist.FileStore(os.environ["RENDEZVOUS"], size), rank=rank, world_size=size)
number, source = 0, "nothing"
state = {{name: np.zeros({CELLS}, "<f4") for name in ("weight", "moment")}}
def described():
    from argosy.checkpoint.gathering import describe_arrays
    from argosy.transfer import Member, replicated
    found = describe_arrays(state)
    found.rank, found.size = rank, size
    for unit in found.units.values():
        member = unit.members["value"]
        layout = replicated(member.shape, tuple(range(size)))
        unit.members["value"] = Member("value", "parameter", member.dtype, layout, member.local)
    return found
print("restoring", flush=True)
try:
    restored = restore(directory, into=described())
    number, source = restored.step, restored.source
except StepNotFound:
    pass
keeping = Keeping(life=OfProcess(pid, begun), peer=peer)
saver = Saver(directory, keep=[KeepLast(2)], keeping=keeping)
print("begun", number, source, flush=True)
while True:
    number += 1
    state["weight"][:] = np.random.default_rng(number).random({CELLS}, np.float32)
    state["moment"][:] = -state["weight"]
    print("saving", number, flush=True)
    handle = saver.save(described(), number)
    handle.copied.result(60)
    print("copied", number, flush=True)
    if number % 3 == 0:
        try:
            handle.wait(60)
            print("durable", number, flush=True)
        except Exception as error:
            print("failed", number, error, flush=True)
"""


@dataclass
class Run:
    """A run's directory, and the process whose life its keepers share."""

    directory: Path
    home: Path
    keeper_life: psutil.Process

    def train(self, *, peer: bool = False, **env: str) -> "subprocess.Popen[str]":
        life = [str(self.keeper_life.pid), repr(self.keeper_life.create_time())]
        command = [sys.executable, "-c", TRAINING, str(self.directory), *life, "peer" if peer else "alone"]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=self.environment(**env))

    def keeping(self, **options: object) -> Keeping:
        return Keeping(life=OfProcess(self.keeper_life.pid, self.keeper_life.create_time()), **options)

    def environment(self, **more: str) -> dict[str, str]:
        paths = {"PYTHONPATH": str(Path(argosy.__file__).parents[1]), "ARGOSY_RUNTIME_DIR": str(self.home)}
        return os.environ | paths | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"} | more

    def keepers(self, kind: str = "") -> list[psutil.Process]:
        """The living keepers that listen in this home; `kind` is sock or peer."""
        found: list[psutil.Process] = []
        for process in psutil.process_iter(["cmdline"]):
            line = " ".join(process.info["cmdline"] or [])
            if line.startswith(f"argosy: keeper at {self.home}/") and line.strip().endswith(kind):
                found.append(process)
        return found


@contextmanager
def a_run(directory: Path) -> Iterator[Run]:
    """A run whose keepers end with this block."""
    with tempfile.TemporaryDirectory(prefix="argosy-") as home:
        with subprocess.Popen(["sleep", "600"]) as life:
            run = Run(directory, Path(home), psutil.Process(life.pid))
            try:
                yield run
            finally:
                life.kill()
                life.wait()
                deadline = time.monotonic() + 30
                while run.keepers() and time.monotonic() < deadline:
                    time.sleep(0.02)
                assert run.keepers() == [], "a keeper outlived its run"
        for path in Path(home).iterdir():  # Logs of keepers that were killed.
            path.unlink()


def is_saved(found: Restored, step: int) -> bool:
    wanted = np.random.default_rng(step).random(CELLS, np.float32)
    tensors = found.tensors
    return tensors["weight"].numpy().tobytes() == wanted.tobytes() == (-tensors["moment"].numpy()).tobytes()


def read_until(process: "subprocess.Popen[str]", word: str, number: int = 0) -> list[str]:
    """Read a training's lines up to one of this word and at least this number; returns the words behind it."""
    assert process.stdout
    for line in process.stdout:
        first, *rest = line.split()
        if first == word and (not number or int(rest[0]) >= number):
            return rest
    raise AssertionError(f"no {word} {number}")


def wait_for(ready: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 30
    while not ready():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def holdings(run: Run, kind: str) -> list[int]:
    """The steps that the keeper (`own`) or its peer holds whole, newest first."""
    found: list[int] = []
    for source in keeper_sources(str(run.directory)):
        if ("peer" in source.label) == (kind == "peer"):
            found += [each.step for each in source.candidates()]
        source.close()
    return found


def flip(run: Run, kind: str, offset: int, *, draft: bool = False) -> None:
    """Turn a bit in the memory that a keeper holds of its newest version: in the arena or in the draft."""
    (source,) = [s for s in keeper_sources(str(run.directory)) if ("peer" in s.label) == (kind == "peer")]
    name = source.candidates()[0].name
    source.close()
    path = next(path for path, label in known_keepers(str(run.directory)) if label == source.label)
    link = connect(path, keeper_decoder, "the keeper")
    link.send(Take(name))
    message, fds = link.wait(10)
    assert isinstance(message, Kept)
    with mmap.mmap(fds[draft], os.fstat(fds[draft]).st_size) as memory:
        memory[offset] ^= 16
    for fd in fds:
        os.close(fd)
    link.close()
