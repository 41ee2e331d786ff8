"""Processes that are forked from a warm one: torch is imported once for all tests of a worker, not for each script."""

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([
    "forked_calls", "checkpoint.trainings",
    "torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.optim",
    "torch._dynamo",  # The first optimizer imports it.
])  # fmt: skip
PLACES = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
PATIENCE_S = 110.0


def start(work: Callable[..., object], *args: Any) -> BaseProcess:
    """Begin a call in a process of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # Else the server cannot import these modules early.
        for name, value in PLACES.items():
            patch.setenv(name, value)
        forkserver.ensure_running()
    process = CONTEXT.Process(target=work, args=args, daemon=True)
    process.start()
    return process


def run(
    work: Callable[..., object] | str, *args: object, ranks: int = 1, env: Mapping[str, str] | None = None
) -> list[str]:
    """Run a function or a script (its text) as so many ranks; returns what each wrote to its standard output.

    RANK and WORLD_SIZE say which rank it is. A script has `args` as its words. One that fails fails the test.
    """
    with tempfile.TemporaryDirectory() as place:
        outs = [Path(place, f"out{rank}") for rank in range(ranks)]
        words = [{**PLACES, **(env or {}), "RANK": str(rank), "WORLD_SIZE": str(ranks)} for rank in range(ranks)]
        started = [start(_begin, work, args, *each) for each in zip(words, outs, strict=True)]
        deadline = time.monotonic() + PATIENCE_S
        for process in started:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in started:
            process.kill()
            process.join()
        said = [path.read_text() if path.exists() else "" for path in outs]
        codes = [process.exitcode for process in started]
        errors = [Path(f"{path}.err").read_text() for path in outs if Path(f"{path}.err").exists()]
        assert codes == [0] * ranks, f"{codes}\n" + "\n".join([*said, *errors])
        return said


def _begin(work: Callable[..., object] | str, args: tuple[object, ...], env: Mapping[str, str], out: Path) -> None:
    for number, path in ((1, out), (2, f"{out}.err")):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600), number)
    os.environ.update(env)
    import torch

    torch.set_num_threads(1)
    if isinstance(work, str):
        sys.argv = ["-c", *map(str, args)]
        exec(compile(work, "<script>", "exec"), {"__name__": "__main__"})
    else:
        work(*args)
    sys.stdout.flush()
