"""Measure the machine at hand into a chip file, as one of several ranks that share it sees it.

All ranks compute at once, each with its part of the cores, since that is what a training does. Small sizes measure the
caches, large ones the memory. Curves hold what was measured, so that prices near them are "measured" or
"interpolated". Two minutes at most: `budget_s` ends the list of sizes early.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from argosy.core import ConfigError

Points = list[tuple[float, float]]
"""Work and seconds."""
MATMUL_SIDES = (16, 32, 64, 128, 256, 512, 1024, 2048)
MEMORY_BYTES = tuple(1 << power for power in range(12, 29))
LINK_BYTES = tuple(1 << power for power in range(10, 25, 2))
LINK_KINDS = ("all_reduce", "all_gather", "reduce_scatter")
LEAST = 3
TIMES = 5
DEADLINE_S = 170.0
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


@dataclass(frozen=True, slots=True)
class ChipFigures:
    """Curves of work and seconds, of one of `ranks` ranks that work at once."""

    matmul: Points
    memory: Points
    links: dict[str, Points]
    """Collective → bytes of the whole payload, and seconds."""
    launch_s: float
    memory_bytes: float
    """One rank's part of the machine's memory."""
    ranks: int
    threads: int
    levels: list[tuple[str, float, float]] = field(default_factory=list[tuple[str, float, float]])
    """Cache or memory, its bytes, and the bytes per second of data that fits into it."""


def measure(*, ranks: int = 2, budget_s: float = 100.0) -> ChipFigures:
    """Measure matrix products, sweeps over memory, and collectives over Gloo, on `ranks` processes at once.

    Raises:
        ConfigError: a process failed, or took far longer than the budget.
    """
    with tempfile.TemporaryDirectory() as directory:
        context: Any = multiprocessing.start_processes(  # pyright: ignore[reportPrivateImportUsage]
            measure_rank, (ranks, directory, budget_s), nprocs=ranks, join=False, start_method="spawn"
        )
        assert context is not None
        end = time.monotonic() + budget_s + DEADLINE_S
        try:
            while not context.join(timeout=1.0):
                if time.monotonic() > end:
                    raise ConfigError(f"measuring took longer than {budget_s + DEADLINE_S:.0f} s")
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
        return ChipFigures(**json.loads((Path(directory) / "found").read_text()))


def measure_rank(rank: int, ranks: int, directory: str, budget_s: float) -> None:
    """One process: measures while the others do the same; rank 0 writes what it saw."""
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=ranks)
    began, matmul, memory = time.monotonic(), Points(), Points()
    links = {kind: Points() for kind in LINK_KINDS} if ranks > 1 else {}
    for kind, points in links.items():
        for bytes_ in LINK_BYTES:
            if go_on(began + 0.4 * budget_s, len(points)):
                points.append((float(bytes_), median_s(collective(kind, bytes_, ranks), fixed=3)))
    for bytes_ in MEMORY_BYTES:
        if go_on(began + 0.7 * budget_s, len(memory)):
            x, out = torch.randn(bytes_ // 8), torch.empty(bytes_ // 8)
            memory.append((float(bytes_), median_s(lambda x=x, out=out: torch.add(x, 1.0, out=out))))
    for side in MATMUL_SIDES:
        if go_on(began + budget_s, len(matmul)):
            a, b = torch.randn(side, side), torch.randn(side, side)
            matmul.append((2.0 * side**3, median_s(lambda a=a, b=b: a @ b)))
    one = torch.ones(1)
    launch_s = median_s(lambda: one.add_(1.0))
    whole = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) / ranks
    levels = memory_levels(memory, whole)
    grown = {kind: growing(points) for kind, points in links.items()}
    found = ChipFigures(growing(matmul), growing(memory), grown, launch_s, whole, ranks, threads, levels)
    if rank == 0:
        (Path(directory) / "found").write_text(json.dumps(asdict(found)))
    dist.destroy_process_group()


def go_on(end: float, count: int) -> bool:
    """Whether all ranks measure one more size; they start it together."""
    late = torch.tensor([float(time.monotonic() > end and count >= LEAST)])
    dist.all_reduce(late)
    return not bool(late)


def collective(kind: str, bytes_: int, ranks: int) -> Callable[[], object]:
    """A call of a collective whose whole payload has so many bytes."""
    whole, part = torch.ones(bytes_ // 4), torch.ones(bytes_ // 4 // ranks)
    whole = whole[: part.numel() * ranks]
    if kind == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part)
    if kind == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole)
    return lambda: dist.all_reduce(whole)


def median_s(function: Callable[[], object], times: int = TIMES, fixed: int = 0) -> float:
    """The median seconds of a call, after one that warms up; short calls are repeated until a clock can see them.

    Collectives are called a `fixed` number of times: every rank must call equally often.
    """
    function()
    began = time.perf_counter()
    function()
    repeat = fixed or max(1, min(1000, int(2e-4 / max(time.perf_counter() - began, 1e-7))))
    found: list[float] = []
    for _ in range(times):
        began = time.perf_counter()
        for _ in range(repeat):
            function()
        found.append((time.perf_counter() - began) / repeat)
    return statistics.median(found)


def growing(points: Sequence[tuple[float, float]]) -> Points:
    """The same points, where more work never takes less time: noise must not make a larger step faster."""
    kept = Points()
    for work, seconds in points:
        kept.append((work, max(seconds, kept[-1][1] if kept else 0.0)))
    return kept


def memory_levels(memory: Points, whole: float) -> list[tuple[str, float, float]]:
    """The caches that the kernel names and the memory; the rate of each is that of the largest data that fits."""
    sizes = {f"L{read(each / 'level')}": kib(read(each / "size")) for each in data_caches()}
    found: list[tuple[str, float, float]] = []
    for name, size in sorted(sizes.items()):
        fitting = [bytes_ / seconds for bytes_, seconds in memory if bytes_ <= size / 2]
        if fitting:
            found.append((name, size, fitting[-1]))
    return [*found, ("memory", whole, memory[-1][0] / memory[-1][1])]


def data_caches() -> list[Path]:
    found = sorted(CACHES.glob("index*")) if CACHES.is_dir() else []
    return [each for each in found if read(each / "type") in ("Data", "Unified")]


def read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def kib(text: str) -> float:
    """`48K` in bytes."""
    number = text.rstrip("KM")
    return float(number or 0) * {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)


def chip_toml(found: ChipFigures, name: str) -> str:
    """The chip file. Peaks are the best rates that were seen; efficiencies are therefore 1."""
    peak = max(work / seconds for work, seconds in found.matmul)
    work, seconds = found.memory[-1]
    reduced = found.links.get("all_reduce") or [(1e6, 1e-3), (1e7, 1e-2)]
    latency = reduced[0][1] / 2
    (x0, y0), (x1, y1) = reduced[-2], reduced[-1]
    bandwidth = (x1 - x0) / max(y1 - y0, 1e-9) if y1 > y0 else x1 / y1
    curves = {"matmul": found.matmul, "memory": found.memory}
    curves |= {f"{kind}_{found.ranks}": points for kind, points in found.links.items()}
    lines = [
        f"# Measured by `argosy chip measure`: one of {found.ranks} ranks at once, {found.threads} threads each.",
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
        f'links = "{"measured" if found.links else "guessed"}"\nefficiency = "guessed"',
    ]
    for level, bytes_, rate in found.levels:
        lines.append(f'\n[[levels]]\nname = "{level}"\nbytes = {bytes_:.4g}\nbandwidth = {rate:.4g}')
    return "\n".join(lines) + "\n"
