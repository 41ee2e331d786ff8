"""A training whose ranks die when its loop is over, or come to it late.

over.py DIRECTORY STEPS PARTS...

Parts: `fsdp`; `stop` ends the loop before its last step; `sum` asks all ranks for something after the loop; `early`:
rank 0 is done with that before rank 1 dies; `late`: rank 1 comes to the loop when the others have waited in vain.
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import argosy
from argosy.data import Loader
from argosy.train import membership

directory, steps, *parts = sys.argv[1:]
membership.FORM_S = 1.0 if "late" in parts or "early" in parts else membership.FORM_S
run = argosy.Run(directory, seed=1)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
model = fully_shard(model) if "fsdp" in parts else nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
run.track(model=model, optimizer=optimizer)
data = Loader(torch.randn(500, 8, generator=torch.Generator().manual_seed(1)), batch=24, seed=2)
if "late" in parts and run.rank == 1:
    time.sleep(2.5)
for step in run.steps(until=int(steps)):
    with step:
        (model(step.batch(data)).square().mean() * step.scale).backward()
        optimizer.step()
    if "stop" in parts and run.step == 3:
        run.stop("enough")


def ask() -> None:
    given = torch.tensor(run.rank + 1)
    dist.all_reduce(given)
    print(f"rank {run.rank} sum {int(given)}", flush=True)


if "early" in parts and run.crew.generation == 0:
    ask()
if run.rank == 1 and run.crew.generation == 0 and "late" not in parts:
    time.sleep(1.0 if "early" in parts else 0.0)
    os.kill(os.getpid(), signal.SIGKILL)
if "sum" in parts and ("early" not in parts or run.crew.generation):
    ask()
weights = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
sums = [float(weight.detach().double().square().sum()) for weight in weights]
print(f"rank {run.rank}.{run.crew.generation} step {run.step} weights {sum(sums):.12f}", flush=True)
