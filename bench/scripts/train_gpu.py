"""A small transformer trained by DDP or FSDP2, one device per rank.   train_gpu.py HOME ddp|fsdp2 STEPS DEVICE [fault]

Under `argosy run`. Each rank appends `time step seconds` to HOME/RANK.steps; rank 0 writes the digest to HOME/digest.
With `fault` the device of the last rank reports an error in the middle, once.
"""

import hashlib
import os
import sys
import time
from pathlib import Path

import torch
from devices import open_device, report_error
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import argosy

home, kind, steps, device, *more = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4], *sys.argv[5:]
switches = open_device(device)
run = argosy.Run(home / "run", seed=1, save_every=20)
width = 2048 if device == "cuda" else 64
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
record_path = home / f"{run.rank}.steps"
faulty = bool(more) and run.rank == run.size - 1 and not record_path.exists()
with record_path.open("a") as record:
    record.write(f"pid {os.getpid()} 0\n")
    record.flush()
    for step in run.steps(until=steps):
        began = time.monotonic()
        with step:
            loss = model(torch.randn(8, 64, width, device=device)).square().mean()
            if faulty and step.number == steps // 2:
                report_error(device, switches)
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
