"""A small training to which something happens; run by test_run.py, alone or by a launcher.

trip.py DIRECTORY STEPS [MISHAP]
"""

import os
import signal
import sys
import time
from contextlib import nullcontext, suppress
from pathlib import Path

import torch
import torch.distributed as dist
from kinds import SAMPLES, digest_of, network, wrapped

import argosy
from argosy.data import Loader

directory, steps, mishap = Path(sys.argv[1]), int(sys.argv[2]), "".join(sys.argv[3:])
if mishap == "start" and os.environ["RANK"] == "1":
    with open(directory / "built.1", "a") as file:
        file.write(f"{os.getpid()}\n")
    raise KeyError("no such setting")
run = argosy.Run(directory, seed=5, save_every=4)
first = run.crew.generation == 0
with open(directory / f"built.{run.rank}", "a") as file:
    file.write(f"{os.getpid()}\n")
model = wrapped(run, network())
if mishap == "wider":
    model = wrapped(run, torch.nn.Linear(8, 5))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
run.track(model=model, optimizer=optimizer)
data = Loader(SAMPLES, batch=8, seed=2)


def note(text: object) -> None:
    with open(directory / f"notes.{run.rank}", "a") as file:
        file.write(f"{text}\n")


def me(rank: int, number: int) -> bool:
    """Whether something happens to this rank, in this step."""
    return (run.rank, step.number) == (rank, number) and not step.rehearsal


catching = suppress(ValueError) if mishap == "caught" else nullcontext()
for step in run.steps(until=steps):
    with catching, step:
        loss = model(step.batch(data)).square().mean()
        if mishap == "raise" and me(1, 3):
            raise ValueError("broken")
        if mishap == "caught" and me(run.rank, 3):
            raise ValueError("broken")
        if mishap == "exit" and me(1, 3):
            sys.exit(7)
        if mishap == "leave" and me(1, 3):
            sys.exit(0)
        if mishap == "vanish" and me(1, 3):
            os._exit(0)
        if mishap == "crash" and me(1, 3):
            os.kill(os.getpid(), signal.SIGSEGV)
        if mishap == "wait" and step.number == 6:
            deadline = time.monotonic() + 300
            while not run.wish.is_urgent and not (directory / "go").exists() and time.monotonic() < deadline:
                time.sleep(0.01)
        if mishap == "stuck" and step.number == 5:
            note("stuck")
            time.sleep(600)
        if mishap == "once":
            note(f"{step.number} {step.once('value', lambda: time.time_ns())}")
            if me(1, 5) and first:
                os.kill(os.getpid(), signal.SIGKILL)
        if mishap == "nan" and me(1, 4):
            loss = loss * float("nan")
        if mishap == "skip" and run.rank == 0 and step.number == 4:
            continue
        loss.backward()
        if mishap == "disagree" and run.rank == 0 and step.number == 4:
            continue
        optimizer.step()
        if mishap == "late raise" and me(1, 3):
            raise ValueError("broken")
        if mishap == "late":
            dist.all_reduce(loss.detach())
        run.log(loss=loss)
    if step.committed:
        note(f"done {step.number}")
    if mishap in ("break", "break and stay") and run.rank == 0 and run.step == 5:
        break
    if mishap == "break all" and run.step == 5:
        time.sleep(run.rank)
        break
    if mishap == "exit after each" and run.rank == 1 and step.committed:
        sys.exit(7)
    if mishap == "save" and run.rank == 0 and run.step == 5:
        run.save("mine")
    if mishap == "save last" and run.rank == 0 and run.step == steps:
        run.save("mine")
    if mishap == "stop" and me(1, 4):
        run.stop("enough")
    if mishap == "aside" and step.every(4):
        with run.aside("evaluation"):
            model.eval()
            if me(1, 3) and first:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.ones(1))
        note(f"training {model.training}")
if mishap == "break all":  # Another loop of the same run, in which a step takes long.
    for step in run.steps(until=7):
        with step:
            time.sleep(2 * run.rank)
            model(step.batch(data)).square().mean().backward()
            optimizer.step()
if mishap == "break and stay" and run.rank == 0:
    time.sleep(600)
digests = run.crew.gather(digest_of(run))
if run.rank == 0:
    print("digests", *digests, flush=True)
if run.size > 1:
    dist.barrier()
