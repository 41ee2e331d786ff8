"""Four ranks: seconds of a training step on a backend, of a kill until all others know, of re-forming.

    python collective_steps.py ddp|fsdp2|loss|reform argosy|gloo [RANKS]

Prints one value per line.
"""

import os
import signal
import statistics
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import argosy.collective
from argosy.core import PeerLost

STEPS = 8
TRIES = 20


def network() -> nn.Module:
    """About 14 million parameters."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(384, 6, 1536, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(4096, 384), nn.TransformerEncoder(layer, 6), nn.Linear(384, 4096))


def time_steps(what: str) -> float:
    """The median of a whole step, in seconds."""
    model = network()
    if what == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard

        for each in model[1].layers:
            fully_shard(each)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    times: list[float] = []
    for _ in range(STEPS):
        start = time.perf_counter()
        tokens = torch.randint(0, 4096, (2, 64))
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def be_rank(what: str, backend: str, rank: int, size: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(minutes=5))
    if what in ("ddp", "fsdp2"):
        seconds = time_steps(what)
        if rank == 0:
            print(seconds, flush=True)
        dist.barrier()
    elif what == "reform":
        for generation in range(1, TRIES + 1):
            dist.barrier()
            start = time.perf_counter()
            dist.group.WORLD.reform(None, generation)
            if rank == 0:
                print(time.perf_counter() - start, flush=True)
        dist.barrier()
    else:
        be_lost(rank, size, store)


def be_lost(rank: int, size: int, store: dist.Store) -> None:
    """The last rank dies in the middle of all-reduces; the others say when they knew."""
    data = torch.ones(1 << 20)
    dist.barrier()
    if rank == size - 1:
        dist.all_reduce(data)
        time.sleep(0.05)
        store.set("killed", repr(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            dist.all_reduce(data)
    except PeerLost:
        late = time.monotonic()
    print(late - float(store.get("killed")), flush=True)


def main() -> None:
    assert argosy.collective
    what, backend, size = sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 4
    for _ in range(TRIES if what == "loss" else 1):
        read, write = os.pipe()
        server = os.fork()
        if server == 0:
            store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
            os.write(write, str(store.port).encode())
            signal.pause()
        port, ranks = int(os.read(read, 16)), []
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                be_rank(what, backend, rank, size, port)
                sys.stdout.flush()
                os._exit(0)
            ranks.append(pid)
        for pid in ranks:
            os.waitpid(pid, 0)
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)


if __name__ == "__main__":
    main()
