"""Measure the machine at hand into a chip file: rates by size of the work, memory by size of the data, links by Gloo.

Small sizes measure the caches, large ones the memory. Curves hold what was measured, so that prices near them are
"measured" or "interpolated". Two minutes at most: `budget_s` ends the list of sizes early.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

MATMUL_SIDES = (16, 32, 64, 128, 256, 512, 1024, 2048)
MEMORY_BYTES = tuple(1 << power for power in range(14, 29, 2))
LINK_BYTES = tuple(1 << power for power in range(10, 25, 2))
LEAST = 3
TIMES = 5
DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True)
class ChipFigures:
    """Curves of work and seconds."""

    matmul: list[tuple[float, float]]
    memory: list[tuple[float, float]]
    all_reduce: list[tuple[float, float]]
    launch_s: float
    memory_bytes: float
    ranks: int


def median_s(function: Callable[[], object], times: int = TIMES) -> float:
    """The median seconds of a call, after one that warms up; short calls are repeated until a clock can see them."""
    function()
    began = time.perf_counter()
    function()
    repeat = max(1, min(1000, int(2e-4 / max(time.perf_counter() - began, 1e-7))))
    found: list[float] = []
    for _ in range(times):
        began = time.perf_counter()
        for _ in range(repeat):
            function()
        found.append((time.perf_counter() - began) / repeat)
    return statistics.median(found)


def growing(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same points, where more work never takes less time: noise must not make a larger step faster."""
    kept: list[tuple[float, float]] = []
    for work, seconds in points:
        kept.append((work, max(seconds, kept[-1][1] if kept else 0.0)))
    return kept


def measure(*, ranks: int = 2, budget_s: float = 100.0) -> ChipFigures:
    """Measure matrix products, sweeps over memory, and all-reduces of `ranks` processes over Gloo."""
    links = measure_links(ranks) if ranks > 1 else []  # First: a process with OpenMP threads must not fork.
    end = time.monotonic() + budget_s * 0.6
    matmul: list[tuple[float, float]] = []
    memory: list[tuple[float, float]] = []
    for side in MATMUL_SIDES:
        if time.monotonic() < end or len(matmul) < LEAST:
            a, b = torch.randn(side, side), torch.randn(side, side)
            matmul.append((2.0 * side**3, median_s(lambda a=a, b=b: a @ b)))
    for bytes_ in MEMORY_BYTES:
        if time.monotonic() < end or len(memory) < LEAST:
            x, out = torch.randn(bytes_ // 8), torch.empty(bytes_ // 8)
            memory.append((float(bytes_), median_s(lambda x=x, out=out: torch.add(x, 1.0, out=out))))
    one = torch.ones(1)
    whole = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    launch_s = median_s(lambda: one.add_(1.0))
    return ChipFigures(growing(matmul), growing(memory), growing(links), launch_s, whole, ranks)


def measure_links(ranks: int) -> list[tuple[float, float]]:
    """Bytes and seconds of an all-reduce; what rank 0 saw."""
    with tempfile.TemporaryDirectory() as directory:
        context: Any = multiprocessing.start_processes(  # pyright: ignore[reportPrivateImportUsage]
            link_rank, (ranks, directory), nprocs=ranks, join=False, start_method="fork"
        )
        assert context is not None
        end = time.monotonic() + DEADLINE_S
        try:
            while not context.join(timeout=1.0):
                if time.monotonic() > end:
                    return []
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
        lines = (Path(directory) / "links").read_text().splitlines()
    return [(float(a), float(b)) for a, b in (line.split() for line in lines)]


def link_rank(rank: int, ranks: int, directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=ranks)
    found: list[str] = []
    for bytes_ in LINK_BYTES:
        value = torch.ones(bytes_ // 4)
        times: list[float] = []
        for _ in range(TIMES + 1):
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(value)
            times.append(time.perf_counter() - began)
        found.append(f"{bytes_} {statistics.median(times[1:])}")
    if rank == 0:
        (Path(directory) / "links").write_text("\n".join(found))
    dist.destroy_process_group()


def chip_toml(found: ChipFigures, name: str) -> str:
    """The chip file. Peaks are the best rates that were seen; efficiencies are therefore 1."""
    peak = max(work / seconds for work, seconds in found.matmul)
    work, seconds = found.memory[-1]
    links = found.all_reduce or [(1e6, 1e-3), (1e7, 1e-2)]
    latency = links[0][1] / 2
    (x0, y0), (x1, y1) = links[-2], links[-1]
    bandwidth = (x1 - x0) / max(y1 - y0, 1e-9) if y1 > y0 else x1 / y1
    curves = {"matmul": found.matmul, "memory": found.memory}
    if found.all_reduce:
        curves[f"all_reduce_{found.ranks}"] = found.all_reduce
    lines = [
        f"# Measured by `argosy chip measure` with {torch.get_num_threads()} threads, torch {torch.__version__}.",
        f'name = "{name}"',
        f"launch_s = {found.launch_s:.4g}",
        "overlap = false",
        f"\n[flops]\nfp32 = {peak:.4g}",
        f"\n[memory]\nbytes = {found.memory_bytes:.4g}\nbandwidth = {work / seconds:.4g}",
        "\n[efficiency]\nmatmul = 1.0\nattention = 0.5\nmemory = 1.0",
        f"\n[[links]]\nranks = 0\nbandwidth = {bandwidth:.4g}\nlatency_s = {latency:.4g}",
        "\n[curves]",
        *(f"{key} = [{', '.join(f'[{x:.6g}, {y:.6g}]' for x, y in curve)}]" for key, curve in curves.items()),
        '\n[sources]\nflops = "measured"\nmemory = "measured"\nlaunch = "measured"',
        f'links = "{"measured" if found.all_reduce else "guessed"}"\nefficiency = "guessed"',
    ]
    return "\n".join(lines) + "\n"
