"""Facts about BLAS threads in a forked rank."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import argosy
from argosy.supervise.rank.threads import blas_threads

COUNT = """
import os, sys
import numpy
from argosy.supervise.rank.threads import blas_setters, blas_threads
sys.stdout.flush()
if sys.argv[1] == "fork":
    setters = blas_setters()
    assert setters, "numpy brings an OpenBLAS"
    assert len(os.listdir("/proc/self/task")) == 1
    child = os.fork()
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    os.environ.pop("OPENBLAS_NUM_THREADS")
    for setter in setters:
        setter(blas_threads(os.environ, len(os.sched_getaffinity(0))))
x = numpy.ones((400, 400))
assert (x @ x)[0, 0] == 400
print(len(os.listdir("/proc/self/task")), flush=True)
"""


@pytest.mark.parametrize(
    ("environ", "threads"),
    [
        ({}, 8),
        ({"OMP_NUM_THREADS": "2"}, 2),
        ({"OMP_NUM_THREADS": "3,2"}, 3),
        ({"OMP_NUM_THREADS": "64"}, 8),
        ({"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "4"}, 4),
        ({"OMP_NUM_THREADS": "many"}, 8),
        ({"OMP_NUM_THREADS": "0"}, 8),
    ],
)
def test_the_environment_decides_as_openblas_reads_it(environ: dict[str, str], threads: int) -> None:
    assert blas_threads(environ, cores=8) == threads


@pytest.mark.parametrize("omp", [None, "1", "2"])
def test_a_forked_rank_has_the_threads_of_a_plain_process(omp: str | None) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    environ = clean | {"PYTHONPATH": str(Path(argosy.__file__).parents[1])}
    if omp is not None:
        environ["OMP_NUM_THREADS"] = omp

    def count(how: str, **more: str) -> str:
        command = [sys.executable, "-c", COUNT, how]
        return subprocess.run(command, env=environ | more, capture_output=True, text=True, check=True).stdout

    assert count("fork", OPENBLAS_NUM_THREADS="1") == count("plain")
