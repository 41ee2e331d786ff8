"""One collective through mpi4py: prints, for each size, the median of its seconds. Started by mpirun.

mpirun -n 4 python mpi_collective.py OPERATION BYTES,...
"""

import statistics
import sys
import time

import numpy as np
from mpi4py import MPI

operation, sizes = sys.argv[1], [int(size) for size in sys.argv[2].split(",")]
world = MPI.COMM_WORLD
ranks = world.Get_size()


def measure(nbytes: int) -> float:
    share = max(1, nbytes // 4 // ranks)
    exact, whole, part = (np.ones(n, np.float32) for n in (max(1, nbytes // 4), share * ranks, share))
    out = np.ones_like(whole)
    calls = {
        "all_reduce": lambda: world.Allreduce(MPI.IN_PLACE, exact),
        "reduce_scatter": lambda: world.Reduce_scatter_block(whole, part),
        "all_gather": lambda: world.Allgather(part, whole),
        "broadcast": lambda: world.Bcast(exact, 0),
        "all_to_all": lambda: world.Alltoall(whole, out),
        "barrier": world.Barrier,
    }
    call, times = calls[operation], []
    count = max(1, min(20, (16 << 20) // max(1, nbytes)))
    call()
    while len(times) < 200 and (len(times) < 3 or world.bcast(sum(times) * count < 0.6)):
        world.Barrier()
        start = time.perf_counter()
        for _ in range(count):
            call()
        times.append((time.perf_counter() - start) / count)
    return statistics.median(times)


for size in sizes:
    seconds = measure(size)
    if world.Get_rank() == 0:
        print(size, seconds, flush=True)
