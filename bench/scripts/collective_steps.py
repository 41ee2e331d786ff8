"""Four ranks: seconds of a training step on a backend, of a kill until all others know, of re-forming.

    python collective_steps.py ddp|fsdp2|loss-OPERATION|reform|memory argosy|gloo [TRIES]

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

SIZE = 4
STEPS = 8


def tell(value: float) -> None:
    """In one write: other ranks tell theirs at the same time."""
    os.write(1, f"{value}\n".encode())


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


def be_rank(what: str, backend: str, rank: int, port: int, tries: int) -> None:
    size = SIZE
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(minutes=5))
    if what in ("ddp", "fsdp2"):
        seconds = time_steps(what)
        if rank == 0:
            tell(seconds)
        dist.barrier()
    elif what == "reform":
        be_replaced(rank, size, store, tries)
    elif what == "memory":
        show_memory(rank)
    else:
        be_lost(what.removeprefix("loss-"), rank, size, store)


def be_replaced(rank: int, size: int, store: dist.Store, tries: int) -> None:
    """In each generation the last rank is another process, forked before: the time from its start to a whole group."""
    world = dist.group.WORLD
    for generation in range(1, tries + 1):
        dist.barrier()
        if rank == size - 1:
            become_another(generation, store)
        else:
            store.wait([f"left{generation}"])
        start = time.perf_counter()
        world.reform(None, generation)
        dist.barrier()
        if rank == 0:
            tell(time.perf_counter() - start)


def become_another(generation: int, store: dist.Store) -> None:
    """Go on in a child, so that the peers meet another process; the parent is killed when it is ready."""
    parent = os.getpid()
    ready, go = os.pipe()
    if os.fork() == 0:
        os.read(ready, 1)
        os.kill(parent, signal.SIGKILL)
        store.set(f"left{generation}", "")
        return
    os.write(go, b"1")
    signal.pause()


def show_memory(rank: int) -> None:
    groups = [dist.group.WORLD]
    for count in (1, 4, 12):
        groups += [dist.new_group() for _ in range(count - len(groups))]
        if rank == 0:
            tell(sum(group.memory() for group in groups) / (1 << 20))
    dist.barrier()


def be_lost(operation: str, rank: int, size: int, store: dist.Store) -> None:
    """The last rank dies while the others are in the operation; they say when they knew."""
    data, whole, small = torch.ones(1 << 20), torch.ones(size << 18), torch.ones(1)
    calls = {
        "all_reduce": lambda: dist.all_reduce(data),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(data[: 1 << 18], whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, data[: 1 << 18]),
        "broadcast": lambda: dist.broadcast(data, size - 1),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
        "small_all_reduce": lambda: dist.all_reduce(small),
        "barrier": dist.barrier,
        "recv": lambda: dist.recv(data, size - 1),
    }
    dist.barrier()
    if rank == size - 1:
        time.sleep(0.05)
        store.set("killed", repr(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            calls[operation]()
    except PeerLost:
        late = time.monotonic()
    tell(late - float(store.get("killed")))


def main() -> None:
    assert argosy.collective
    what, backend, tries = sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 20
    for _ in range(tries if what.startswith("loss") else 1):
        read, write = os.pipe()
        server = os.fork()
        if server == 0:
            store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
            os.write(write, str(store.port).encode())
            signal.pause()
        port, ranks = int(os.read(read, 16)), []
        for rank in range(SIZE):
            pid = os.fork()
            if pid == 0:
                be_rank(what, backend, rank, port, tries)
                sys.stdout.flush()
                os._exit(0)
            ranks.append(pid)
        for pid in ranks:
            os.waitpid(pid, 0)
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)


if __name__ == "__main__":
    main()
