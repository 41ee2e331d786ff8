"""Tiny DDP on Gloo to the first optimizer step and gone.   ddp_step.py [REPORT_DIR]

With a directory, each rank writes there how many kB only it holds, measured while all have made their
step and none has left: a page shared with a sibling counts as private once the sibling is gone.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def private_kb() -> int:
    fields = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return sum(int(field[1]) for field in fields if field[0] in ("Private_Clean:", "Private_Dirty:"))


dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(32, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model(torch.randn(4, 32)).square().mean().backward()
optimizer.step()
if dist.get_rank() == 0:
    print("first step", flush=True)
if len(sys.argv) > 1:
    dist.barrier()
    Path(sys.argv[1], f"{dist.get_rank()}.kb").write_text(str(private_kb()))
    dist.barrier()
dist.destroy_process_group()
