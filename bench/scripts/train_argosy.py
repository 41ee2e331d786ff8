"""A training that survives, for ever.   train_argosy.py HOME {ddp|fsdp2} [compiled]

Under `argosy run`.
"""

import os
import sys

import torch
from gpt import shard
from stepping import Steps, model_and_seed, optimizer_of, train
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

import argosy

home, kind, *how = sys.argv[1:]
run = argosy.Run(os.path.join(home, "run"))
plain = model_and_seed()
model = DDP(plain) if kind == "ddp" else shard(plain, init_device_mesh("cpu", (run.size,)))
optimizer = optimizer_of(model)
run.track(model=model, optimizer=optimizer)
used = torch.compile(model) if "compiled" in how else model
steps = Steps(home, run.rank)
for step in run.steps():
    with step:
        run.log(loss=train(used, optimizer))
    if step.committed:
        steps.counts(run.step)
