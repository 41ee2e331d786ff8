"""All-reduce on the devices of all ranks, by `argosy` and by torch's own group.   collective_gpu.py HOME DEVICE"""

import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from devices import open_device

import argosy.collective  # noqa: F401, it registers the backend

home, device = Path(sys.argv[1]), sys.argv[2]
open_device(device)
dist.init_process_group("argosy")
other = "nccl" if device == "cuda" else "gloo"
# Gloo knows no emulated device: there its time is that of the CPU's memory.
groups = [(None, device), (dist.new_group(backend=other), device if other == "nccl" else "cpu")]


def reduce_s(group: "dist.ProcessGroup | None", where: str, cells: int) -> float:
    tensor, samples = torch.ones(cells, device=where), list[float]()
    for _ in range(25):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        if where != "cpu":
            torch.accelerator.synchronize()
        samples.append(time.perf_counter() - began)
    return statistics.median(samples[5:])


found = [(4 * cells, *(reduce_s(*each, cells) for each in groups)) for cells in (1, 1 << 18, 1 << 24)]
if dist.get_rank() == 0:
    (home / "found.json").write_text(json.dumps({"other": other, "all_reduce": found}))
dist.barrier()
