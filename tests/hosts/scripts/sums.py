"""A script for torchrun, unmodified: each rank says where it is, then all add up their numbers."""

import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
print("place", *(os.environ[name] for name in names), "sum", int(total.item()), flush=True)
dist.destroy_process_group()
