"""Rank 0 dies in step 6; while its replacement takes the state over, rank 1, which had it, dies too."""

import os
import signal
import sys
from pathlib import Path

import kinds

import argosy

directory = Path(sys.argv[1])
run = argosy.Run(directory, seed=5, save_every=1000)
training = kinds.Plain(run, None)
(directory / f"pid.{run.rank}.{run.crew.generation}").write_text(str(os.getpid()))


class Witness:
    def state_dict(self):
        return {"step": run.step}

    def load_state_dict(self, found):
        if run.rank == 0 and run.crew.generation == 1 and found["step"] and not (directory / "shot").exists():
            (directory / "shot").touch()
            os.kill(int((directory / "pid.1.0").read_text()), signal.SIGKILL)


run.track(witness=Witness())
for step in run.steps(until=12):
    if len(sys.argv) < 3 and (run.rank, run.crew.generation, step.number) == (0, 0, 6):
        os.kill(os.getpid(), signal.SIGKILL)
    with step:
        training.step(step, lambda _: None)
        run.log(loss=training.loss)
kinds.end(run)
