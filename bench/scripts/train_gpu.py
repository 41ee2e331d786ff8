"""A small transformer trained by DDP or FSDP2 on one accelerator per rank.   train_gpu.py HOME {ddp|fsdp2} STEPS DEVICE

Under `argosy run`. Each rank appends `time step seconds` to HOME/RANK.steps; rank 0 writes the digest to HOME/digest.
"""

import hashlib
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import argosy

home, kind, steps, device = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
run = argosy.Run(home / "run", seed=1, save_every=20)
if device != "cpu":
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
width = 128 if device == "cpu" else 2048
layers = [nn.TransformerEncoderLayer(width, 8, 4 * width, 0.1, batch_first=True) for _ in range(4)]
model: nn.Module = nn.Sequential(*layers).to(device)
if kind == "ddp":
    model = DDP(model)
else:
    mesh = init_device_mesh(device, (run.size,))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
run.track(model=model, optimizer=optimizer)
with (home / f"{run.rank}.steps").open("a") as record:
    record.write(f"pid {os.getpid()} 0\n")
    record.flush()
    for step in run.steps(until=steps):
        began = time.monotonic()
        with step:
            loss = model(torch.randn(8, 64, width, device=device)).square().mean()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
        if step.committed:
            record.write(f"{time.time()} {run.step} {time.monotonic() - began}\n")
            record.flush()
seen = hashlib.blake2s()
for parameter in model.parameters():
    whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    seen.update(whole.detach().cpu().view(-1).view(torch.uint8).numpy().tobytes())
if run.rank == 0:
    (home / "digest").write_text(seen.hexdigest())
