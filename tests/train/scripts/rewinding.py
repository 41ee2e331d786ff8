"""Two ranks that go back from step 10 to step 4, once; RANK:STEP or RANK:rewind says who dies where."""

import os
import signal
import sys

import kinds

import argosy

directory, death = sys.argv[1:]
run = argosy.Run(directory, seed=5, save_every=4)
training = kinds.Plain(run, None)


def place(name) -> None:
    if death == f"{run.rank}:{name}" and not run.crew.generation:
        run.saves.flush()  # A death costs the checkpoint under way, and with it the step to go back to.
        os.kill(os.getpid(), signal.SIGKILL)


restore = run.healing.restore


def restoring(folder, step):
    if step is not None:
        place("rewind")
    return restore(folder, step)


run.healing.restore = restoring
for step in run.steps(until=12):
    with step:
        place(step.number if not step.rehearsal else "rehearsal")
        if step.number == 9 and not run.ledger.eras and run.rank == 1:
            run.rewind(6)
        training.step(step, lambda _: None)
        run.log(loss=training.loss)
kinds.end(run)
