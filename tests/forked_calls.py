"""Functions and scripts as ranks, each in a fork of the process that has torch already (`warm.py`)."""

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from warm import warm

PLACES = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
PATIENCE_S = 110.0
CALL = "import pickle, sys; work, args = pickle.loads(bytes.fromhex(sys.argv[1])); work(*args)"


def start(
    work: Callable[..., object] | str, *args: object, env: Mapping[str, str] | None = None, **streams: Any
) -> "subprocess.Popen[bytes]":
    """Begin a call of a function, or a script (its text), which has `args` as its words."""
    is_script = isinstance(work, str)
    words = ["-c", work, *map(str, args)] if is_script else ["-c", CALL, pickle.dumps((work, args)).hex()]
    places = {**os.environ, **PLACES, "PYTHONPATH": os.pathsep.join(sys.path), **(env or {})}
    return subprocess.Popen([*warm(), *words], env=places, **streams)


def run(
    work: Callable[..., object] | str, *args: object, ranks: int = 1, env: Mapping[str, str] | None = None
) -> list[str]:
    """Run a function or a script as so many ranks; returns what each wrote to its standard output.

    RANK and WORLD_SIZE say which rank it is. One that fails fails the test, with what all of them said.
    """
    with tempfile.TemporaryDirectory() as place:
        started: list[subprocess.Popen[bytes]] = []
        outs = [[Path(place, f"{name}{rank}") for name in ("out", "err")] for rank in range(ranks)]
        for rank, (out, err) in enumerate(outs):
            whole = {**(env or {}), "RANK": str(rank), "WORLD_SIZE": str(ranks)}
            with out.open("wb") as stdout, err.open("wb") as stderr:
                started.append(start(work, *args, env=whole, stdout=stdout, stderr=stderr))
        deadline = time.monotonic() + PATIENCE_S
        try:
            codes = [process.wait(max(0.0, deadline - time.monotonic())) for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
        assert codes == [0] * ranks, f"{codes}\n" + "\n".join(path.read_text() for paths in outs for path in paths)
        return [out.read_text() for out, _ in outs]
