"""A GPT-like model under FSDP2 and plain torchrun; what Argosy adds is three lines."""

import os
import sys
import time
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from argosy.checkpoint import Saver, StepNotFound, restore

directory, until = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(50, 18), nn.TransformerEncoderLayer(18, 2, 36, dropout=0.0), nn.Linear(18, 50))
for module in (*model, model):
    fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
state, step = {"model": model, "optimizer": optimizer}, 0
saver = Saver(directory)
with suppress(StepNotFound):
    step = restore(directory, into=state).step
if dist.get_rank() == 0:
    print("begins at", step, flush=True)
while step < until:
    tokens = torch.randint(50, (4, 7), generator=torch.Generator().manual_seed(step))
    logits = model(tokens)
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    saver.save(state, step).wait(60)
    if dist.get_rank() == 0:
        print("durable", step, flush=True)
if len(sys.argv) > 3:  # Wait to be killed.
    time.sleep(100)
saver.close()
dist.destroy_process_group()
os._exit(0)
