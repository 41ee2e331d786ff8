"""Measure the collectives of this host through `torch.distributed`, and compare them with Gloo.

python -m argosy.collective.bench --ranks 4 --sizes 4,1048576,268435456 --json
"""

# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportPrivateImportUsage=false
# pyright: reportAttributeAccessIssue=false

import argparse
import json
import os
import select
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from argosy.collective.backend import register
from argosy.core import ArgosyError

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "barrier")
_UNITS = {"K": 10, "M": 20, "G": 30}
SIZES = (4, 4096, 65536, 1 << 20, 16 << 20, 256 << 20)
BACKENDS = ("argosy", "gloo")
_SAMPLE_S = 0.6
_SAMPLES_MAX = 200
_CELL_S = 300.0
_END_S = 10.0


class Result(msgspec.Struct, frozen=True):
    """One cell of the table: an operation on `nbytes` per rank (of the gathered or scattered whole), in seconds."""

    backend: str
    operation: str
    nbytes: int
    ranks: int
    median_s: float
    best_s: float
    samples: int

    @property
    def bus_gb_s(self) -> float:
        """Bus bandwidth as NCCL's tests define it: the bytes that each rank must move at least, per second."""
        share = (self.ranks - 1) / self.ranks
        factor = {"all_reduce": 2 * share, "broadcast": 1.0, "barrier": 0.0}.get(self.operation, share)
        return factor * self.nbytes / self.median_s / 1e9


def measure(ranks: int, sizes: Sequence[int], operations: Sequence[str], backends: Sequence[str]) -> list[Result]:
    """Fork `ranks` processes and measure; samples of the backends alternate. No process is left running.

    Raises:
        ArgosyError: a rank failed, or a cell took minutes.
    """
    children: list[int] = []
    found: list[Result] = []
    try:
        port = _fork_store(children)
        result, report = os.pipe()  # After the store's fork, which would keep its end open.
        for rank in range(ranks):
            pid = os.fork()
            if pid == 0:
                _be_rank(rank, port, report, (ranks, sizes, operations, backends))
            children.append(pid)
        os.close(report)
        with os.fdopen(result, "rb") as file:
            for operation, nbytes in _rows(sizes, operations):
                ready, _, _ = select.select([file], [], [], _CELL_S)
                line = file.readline() if ready else b""
                if not line:
                    why = "a rank failed" if ready else f"no result within {_CELL_S:g} s"
                    raise ArgosyError(f"{operation} of {nbytes} bytes: {why}")
                found += msgspec.json.decode(line, type=list[Result])
        for pid in children[1:]:
            _await_end(pid)  # A rank that is killed in the last barrier would make the others complain.
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return found


def _await_end(pid: int) -> None:
    pidfd = os.pidfd_open(pid)
    select.select([pidfd], [], [], _END_S)
    os.close(pidfd)


def _rows(sizes: Sequence[int], operations: Sequence[str]) -> list[tuple[str, int]]:
    return [(operation, size) for operation in operations for size in (sizes if operation != "barrier" else [0])]


def _fork_store(children: list[int]) -> int:
    """Start a store in a process of its own: a process with the store's threads must not fork ranks."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        store: Any = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        os.write(write, str(store.port).encode())
        signal.pause()
    children.append(pid)
    os.close(write)
    try:
        return int(os.read(read, 16))
    finally:
        os.close(read)


def _be_rank(rank: int, port: int, report: int, what: tuple[int, Sequence[int], Sequence[str], Sequence[str]]) -> None:
    ranks, sizes, operations, backends = what
    try:
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        register()
        store = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(minutes=5))
        groups = {backend: dist.new_group(backend=backend) for backend in backends}
        if rank > 0:
            os.close(report)
        for operation, nbytes in _rows(sizes, operations):
            cells = _cells(operation, nbytes, ranks, groups)
            if rank == 0:
                os.write(report, msgspec.json.encode(cells) + b"\n")
        dist.barrier()
    except BaseException as error:
        print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def _cells(operation: str, nbytes: int, ranks: int, groups: dict[str, Any]) -> list[Result]:
    call = _call(operation, nbytes, ranks)
    calls = max(1, min(20, (16 << 20) // max(1, nbytes)))  # One short call would measure the barrier before it.
    times: dict[str, list[float]] = {backend: [] for backend in groups}
    began = time.perf_counter()
    for _ in range(_SAMPLES_MAX):
        for backend, group in groups.items():
            if not times[backend]:
                call(group)
            dist.barrier()
            start = time.perf_counter()
            for _ in range(calls):
                call(group)
            times[backend].append((time.perf_counter() - start) / calls)
        enough = torch.tensor([float(time.perf_counter() - began > _SAMPLE_S * len(groups))])
        dist.broadcast(enough, 0)
        if enough.item() and len(times[next(iter(groups))]) >= 3:
            break
    return [
        Result(backend, operation, nbytes, ranks, statistics.median(values), min(values), len(values))
        for backend, values in times.items()
    ]


def _call(operation: str, nbytes: int, ranks: int) -> Callable[[Any], object]:
    share, whole = max(1, nbytes // 4 // ranks), max(1, nbytes // 4)
    if operation in ("all_reduce", "broadcast"):
        data = torch.ones(whole)
        return {
            "all_reduce": lambda group: dist.all_reduce(data, group=group),
            "broadcast": lambda group: dist.broadcast(data, 0, group=group),
        }[operation]
    if operation == "barrier":
        return lambda group: dist.barrier(group=group)
    given, other = torch.ones(share * ranks), torch.ones(share * (ranks if operation == "all_to_all" else 1))
    calls: dict[str, Callable[[Any], object]] = {
        "reduce_scatter": lambda group: dist.reduce_scatter_single(other, given, group=group),
        "all_gather": lambda group: dist.all_gather_single(given, other, group=group),
        "all_to_all": lambda group: dist.all_to_all_single(other, given, group=group),
    }
    return calls[operation]


def table(results: Sequence[Result], backends: Sequence[str]) -> Table:
    """One line per operation and size; the last column compares with the last backend."""
    shown = Table(title=f"{results[0].ranks} ranks on one host, medians")
    shown.add_column("operation")
    shown.add_column("bytes", justify="right")
    for backend in backends:
        shown.add_column(f"{backend} us", justify="right")
        shown.add_column("bus GB/s", justify="right")
    shown.add_column("ratio", justify="right")
    cells: dict[tuple[str, int], dict[str, Result]] = {}
    for result in results:
        cells.setdefault((result.operation, result.nbytes), {})[result.backend] = result
    for (operation, nbytes), row in cells.items():
        texts: list[str] = []
        for backend in backends:
            speed = f"{row[backend].bus_gb_s:.2f}" if nbytes >= 65536 else ""
            texts += [f"{row[backend].median_s * 1e6:.0f}", speed]
        ratio = row[backends[-1]].median_s / row[backends[0]].median_s
        shown.add_row(operation, str(nbytes), *texts, f"{ratio:.1f}x")
    return shown


def _ranks(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"ranks must be at least 2: {text!r}")
    return int(text)


def _sizes(text: str) -> list[int]:
    """Read `4,64K,256M`."""
    found: list[int] = []
    for part in text.split(","):
        number, unit = (part[:-1], part[-1].upper()) if part[-1:].upper() in _UNITS else (part, "")
        if not number.isdecimal() or (size := int(number) << _UNITS.get(unit, 0)) % 4:
            raise argparse.ArgumentTypeError(f"sizes must be multiples of 4 bytes, such as 4,64K,256M: {part!r}")
        found.append(size)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m argosy.collective.bench", description=__doc__)
    parser.add_argument("--ranks", type=_ranks, default=min(4, 2 * (os.cpu_count() or 1)))
    parser.add_argument("--sizes", type=_sizes, default=SIZES, help="bytes, comma-separated: 4,64K,256M")
    parser.add_argument("--operations", default=",".join(OPERATIONS))
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    backends = given.backends.split(",")
    results = measure(given.ranks, given.sizes, given.operations.split(","), backends)
    if given.json:
        print(json.dumps([msgspec.to_builtins(result) | {"bus_gb_s": result.bus_gb_s} for result in results]))
    else:
        Console().print(table(results, backends))


if __name__ == "__main__":
    main()
