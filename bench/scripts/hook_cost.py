"""Print what recording costs a rank in CPU seconds per step: `hook_cost.py argosy|traceml STEPS`.

Two sets of four DDP ranks take turns, twenty steps each: one records, the other does not. A step takes 50 ms, most of
it asleep, so that caches are as cold as in a real one; it has 24 modules and four buckets. The result is the
difference of the medians of the CPU time of the training threads.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

RANKS, LAYERS, WIDTH, TURN, WARM_UP, STEP_S = 4, 24, 64, 20, 40, 0.05


def record_argosy(folder: Path, rank: int) -> None:
    from argosy.observe import Page, Ring, install, record_spans

    record_spans(Ring.create(folder / f"{rank}.0.page.spans"))
    install(Page.create(folder / f"{rank}.0.page"))


def be_rank(kind: str, rank: int, folder: Path) -> None:
    """Do as many steps as each line of the input says; print the CPU time of each."""
    around: Any = nullcontext
    if kind == "argosy":
        record_argosy(folder, rank)
    elif kind == "traceml":
        import traceml

        traceml.init(mode="auto")
        around = traceml.trace_step
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    model = DDP(torch.nn.Sequential(*layers), bucket_cap_mb=LAYERS * WIDTH * WIDTH * 4 / 4 / 2**20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = iter(torch.utils.data.DataLoader(torch.randn(1 << 16, WIDTH), batch_size=8))
    for line in sys.stdin:
        for _ in range(int(line)):
            began, at = time.thread_time(), time.monotonic()
            with around(model) if kind == "traceml" else around():
                optimizer.zero_grad()
                model(next(batches)).square().mean().backward()
                optimizer.step()
            took = time.thread_time() - began
            print(took, flush=True)
            time.sleep(max(0.0, STEP_S - (time.monotonic() - at)))


def start(kind: str, folder: Path) -> list[subprocess.Popen[str]]:
    folder.mkdir()
    return [
        subprocess.Popen(
            [sys.executable, __file__, kind, "rank", str(rank), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(RANKS)
    ]


def take_turn(ranks: list[subprocess.Popen[str]], steps: int) -> list[float]:
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write(f"{steps}\n")
        rank.stdin.flush()
    found: list[float] = []
    for rank in ranks:
        assert rank.stdout is not None
        for _ in range(steps):
            line = rank.stdout.readline()
            if not line:
                raise SystemExit("a rank ended")
            found.append(float(line))
    return found


def main(kind: str, steps: int) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        sets = {each: start(each, Path(folder, each)) for each in ("bare", kind)}
        times: dict[str, list[float]] = {each: [] for each in sets}
        try:
            for ranks in sets.values():
                take_turn(ranks, WARM_UP)
            for _ in range(max(1, steps // TURN)):
                for each, ranks in sets.items():
                    times[each] += take_turn(ranks, TURN)
        finally:
            for ranks in sets.values():
                for rank in ranks:
                    rank.kill()
                    rank.wait()
        print(statistics.median(times[kind]) - statistics.median(times["bare"]))


if __name__ == "__main__":
    if sys.argv[2] == "rank":
        be_rank(sys.argv[1], int(sys.argv[3]), Path(sys.argv[4]))
    else:
        main(sys.argv[1], int(sys.argv[2]))
