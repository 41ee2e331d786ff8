"""An ordinary DDP script that knows nothing of Argosy, with a fault that its first argument names."""

import gc
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT, STEPS, WIDTH = sys.argv[1], int(sys.argv[2]), 192
SLEEP_S = 0.05
injected_s = 0.0
"""How long the fault took, by this script's own clock."""


@contextmanager
def injected() -> Generator[None]:
    """Measure a fault."""
    global injected_s
    began = time.perf_counter()
    yield
    injected_s += time.perf_counter() - began


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Numbers; a batch comes late if the data is slow."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        if FAULT == "slow_data":
            with injected():
                time.sleep(SLEEP_S)
        return [torch.full((WIDTH,), float(index % 7)) for index in indices]


def hog() -> None:
    """Keep the GIL as long as Python lets a thread keep it."""
    while True:
        sum(range(100_000))


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank = dist.get_rank()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    depth = 20 if FAULT == "small_batch" else 6
    layers = [layer for _ in range(depth) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
    model = DDP(torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if FAULT == "small_batch":
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False, amsgrad=True)
    kept: list[object] = []
    if FAULT == "gc_storm":
        kept.append([{"number": number} for number in range(200_000)])
    if FAULT == "lock":
        threading.Thread(target=hog, daemon=True).start()
    samples = Samples()
    batch_size = 1 if FAULT == "small_batch" else 64
    for step, batch in enumerate(torch.utils.data.DataLoader(samples, batch_size=batch_size)):
        if step == STEPS:
            break
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        if FAULT == "slow_rank" and rank == 2:
            with injected():
                time.sleep(SLEEP_S)
        loss.backward()
        optimizer.step()
        if step == STEPS // 2:
            disagree(rank)
        if FAULT == "gc_storm":
            with injected():
                gc.collect()
        if FAULT == "leak":
            kept.append(torch.ones(1 << 20))  # 4 MiB
            time.sleep(SLEEP_S)  # Long enough to be measured a few times.
        if FAULT == "slow_disk" and rank == 0 and step % 4 == 0:
            with injected():
                torch.save(Slow(model.module.state_dict()), Path("model.pt"))
    dist.barrier()
    print(f"injected {injected_s:.6f} s", flush=True)
    dist.destroy_process_group()


def disagree(rank: int) -> None:
    """One rank does not call a collective, or calls it with another shape."""
    if FAULT == "missing_collective" and rank != 2:
        dist.all_reduce(torch.zeros(1000))
    if FAULT == "mismatched_shape":
        dist.all_reduce(torch.zeros(900 if rank == 2 else 1000))


class Slow:
    """A state that takes long to write."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        self.state = state

    def __reduce__(self):
        time.sleep(4 * SLEEP_S)
        return dict, (self.state,)


if __name__ == "__main__":
    main()
