"""Steps as small as they can be, for ever; each tells its number and what the process holds.   tiny.py DIRECTORY"""

import os
import sys
from pathlib import Path

import kinds
import torch

import argosy

run = argosy.Run(sys.argv[1], seed=1, save_every=5000, save_every_s=1e9)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
run.track(model=model, optimizer=optimizer)
data = argosy.data.Loader(kinds.SAMPLES[:, :2], batch=run.size)
told = Path(sys.argv[1], f"held.{run.rank}")
page = os.sysconf("SC_PAGE_SIZE")
for step in run.steps():
    with step:
        loss = model(step.batch(data)).square().mean()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
    if step.every(500):
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * page
        with told.open("a") as file:
            file.write(f"{run.step} {resident} {len(os.listdir('/proc/self/fd'))} {os.getpid()}\n")
