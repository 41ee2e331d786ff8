"""Print the CPU time of a DDP step (lower quartile, seconds), with Argosy's hooks (`hooked`) or without (`bare`).

A real step of many modules and four buckets on tensors so small that torch itself takes little.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

LAYERS, WIDTH, STEPS = 24, 64, 400


def install(folder: Path) -> None:
    from argosy.observe import Page, Ring, install, record_spans

    record_spans(Ring.create(folder / "0.0.page.spans"))
    install(Page.create(folder / "page"))


def main() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        if sys.argv[1] == "hooked":
            install(Path(folder))
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        torch.set_num_threads(1)
        layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
        bucket_mb = LAYERS * WIDTH * WIDTH * 4 / 4 / 2**20
        model = DDP(torch.nn.Sequential(*layers), bucket_cap_mb=bucket_mb)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = torch.utils.data.DataLoader(torch.randn(8 * (STEPS + 20), WIDTH), batch_size=8)
        times = list[float]()
        began = time.thread_time()
        for batch in loader:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            now = time.thread_time()
            times.append(now - began)
            began = now
        print(statistics.quantiles(times[20:], n=4)[0])
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
