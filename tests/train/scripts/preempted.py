"""A training that waits in step 6 until it is told to stop; run by test_preempted.py.

preempted.py DIRECTORY KIND [go]
"""

import os
import sys
import time
from pathlib import Path

import kinds

import argosy

directory, kind, *go = sys.argv[1:]
run = argosy.Run(directory, seed=5, save_every=4)
training = kinds.KINDS[kind](run, None)


def wait(place: str) -> None:
    """In the forward pass of step 6: wait for SIGTERM."""
    if place != "forward" or run.step != 6 or go:
        return
    Path(directory, f"waits.{run.rank}").write_text(str(os.getpid()))
    deadline = time.monotonic() + 300
    while not run.wish.is_urgent and time.monotonic() < deadline:
        time.sleep(0.01)


for step in run.steps(until=9):
    with step:
        training.step(step, wait)
        run.log(loss=training.loss)
kinds.end(run)
