"""A small training that can branch off, save a step twice, or compute steps twice; run by test_twice.py.

branch.py DIRECTORY STEPS [parent=DIRECTORY@STEP] [tag=STEP] [recheck=STEPS] [flip=RANK:STEP]
"""

import hashlib
import sys

import kinds
import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import argosy

directory, steps, *words = sys.argv[1:]
wanted = dict(word.split("=", 1) for word in words)
recheck = int(wanted["recheck"]) if "recheck" in wanted else None
run = argosy.Run(directory, seed=1, save_every=5, parent=wanted.get("parent"), recheck=recheck)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
replica = DDP(model) if run.size > 1 else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
run.track(model=replica, optimizer=optimizer)
data = kinds.Loader(np.random.default_rng(0).standard_normal((500, 8)).astype(np.float32), batch=8, seed=4)
flip = [int(number) for number in wanted.get("flip", "-1:-1").split(":")]
attempts = 0
for step in run.steps(until=int(steps)):
    with step:
        batch = step.batch(data)
        attempts = attempts + 1 if not step.rehearsal and step.number == flip[1] else 0
        if [run.rank, step.number] == flip and attempts == 2 and run.crew.generation == 0:
            batch.view(torch.int32).view(-1)[3] ^= 1 << 20  # one bit, the second time
        loss = replica(batch).square().mean()
        loss.backward()
        optimizer.step()
        run.log(loss=loss, first=data.handed.ids[0])
    if step.committed and str(run.step) == wanted.get("tag"):
        run.save("mine")
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()[:12]
print(f"rank {run.rank} digest {digest} step {run.step}", flush=True)
