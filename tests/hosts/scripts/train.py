"""A small training under `argosy.Run`: `train.py DIRECTORY STEPS SECONDS [FILE]`.

A step takes so many seconds; the last one begins when FILE exists.
"""

import hashlib
import os
import sys
import time

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import argosy

samples = np.random.default_rng(0).standard_normal((512, 8)).astype(np.float32)
run = argosy.Run(sys.argv[1], seed=0)
model = DDP(torch.nn.Linear(8, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
run.track(model=model, optimizer=optimizer)
data = argosy.data.Loader(samples, batch=16)
for step in run.steps(until=int(sys.argv[2])):
    with step:
        loss = model(step.batch(data)).square().mean()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
    if run.rank == 0:
        print(f"did step {step.number};", flush=True)
    time.sleep(float(sys.argv[3]))
    while step.number == int(sys.argv[2]) - 1 and sys.argv[4:] and not os.path.exists(sys.argv[4]):
        time.sleep(0.1)
digest = hashlib.sha256(b"".join(weight.detach().numpy().tobytes() for weight in model.parameters()))
print("digest", digest.hexdigest(), flush=True)
