"""A training of some kind whose ranks die where they are told to; run by test_voyages.py through `argosy run`.

voyage.py DIRECTORY KIND STEPS [RANK.GENERATION:PLACE[:STEP][>VICTIM|>device|>memory]]...
"""

import os
import signal
import sys
import time
from pathlib import Path

import kinds

import argosy
from argosy.collective import segment

directory, kind, steps, *deaths = sys.argv[1:]
run = argosy.Run(directory, seed=5, save_every=max(4, int(steps) // 20))
me = f"{run.rank}.{run.crew.generation}"
at = os.open(Path(directory, f"at.{run.rank}"), os.O_CREAT | os.O_WRONLY, 0o600)
os.pwrite(at, b"start".ljust(16, b"\0"), 0)


def place(name: str, step: int | None = None) -> None:
    """Somewhere in the life of a rank: if this is where it was said, it dies, or kills another one."""
    os.pwrite(at, name.encode().ljust(16, b"\0"), 0)
    for death in deaths:
        death, _, victim = death.partition(">")
        who, where, *when = death.split(":")
        if (who, where) == (me, name) and (not when or int(when[0]) == step):
            if victim == "device":
                kinds.break_device()
                return
            if victim == "memory":
                kinds.exhaust_memory()
                return
            time.sleep(0.5 if name == "healed" else 0.0)  # Until others have taken the state over.
            pids = Path(directory, f"built.{victim}").read_text().split() if victim else [os.getpid()]
            os.kill(int(pids[-1]), signal.SIGKILL)


def dying(function, name):
    """The function, with a place before it."""

    def call(*args, **kwargs):
        place(name, run.step)
        return function(*args, **kwargs)

    return call


training = kinds.KINDS[kind](run, place)
with open(Path(directory, f"built.{run.rank}"), "a") as file:
    file.write(f"{os.getpid()}\n")
with open(Path(directory, f"sees.{run.rank}"), "a") as file:
    file.write(f"{os.environ.get('CUDA_VISIBLE_DEVICES', '-')}\n")
segment.open_peer_segment = dying(segment.open_peer_segment, "meet")  # Not of rank 0, after all have said who they are.
run.crew.meet = dying(run.crew.meet, "reform")
run.healing.heal = dying(run.healing.heal, "heal")
run.healing.take_local = dying(run.healing.take_local, "adopted")
run.healing._catch_up = dying(run.healing._catch_up, "healed")
run.saves.save = dying(run.saves.save, "snapshot")
place("constructor")
seen = Path(directory, f"samples.{run.rank}.{run.crew.generation}")
for step in run.steps(until=int(steps)):
    here = None if step.rehearsal else step.number
    if step.rehearsal:
        place("rehearsal")
    with step:
        ids = training.step(step, lambda name, at=here: None if at is None else place(name, at))
        run.log(loss=training.loss)
    if step.committed:
        with seen.open("a") as file:
            file.write(f"{step.number} {' '.join(map(str, ids))}\n")
    if step.every(3):
        with run.aside("evaluation"):
            place("evaluation", here)
            run.log(norm=sum(t.detach().float().square().sum() for t in run.tracked.parameters().values()))
kinds.end(run)
