"""A script that starts its own ranks, as `python script.py` does on one machine."""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def work(rank: int, size: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=size)
    total = torch.ones(1)
    dist.all_reduce(total)
    if rank == 0:
        print("met", int(total))
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    mp.spawn(work, (2,), nprocs=2)
