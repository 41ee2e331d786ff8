"""A rank with torch at a barrier.   torch_barrier.py {argosy|tcp|gloo} PORT"""

import sys

import torch
import torch.distributed as dist

kind, port = sys.argv[1], int(sys.argv[2])
assert torch.ones(1).item() == 1.0
if kind == "argosy":
    from argosy import fabric

    fabric.here().barrier()
elif kind == "tcp":
    from tcp_barrier import tcp_barrier

    tcp_barrier(port)
else:
    dist.init_process_group("gloo")
    dist.barrier()
    dist.destroy_process_group()
