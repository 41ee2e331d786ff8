"""Measure the host, its ranks and its GPUs from outside, about once a second.

GPUs are read through NVML (`pip install nvidia-ml-py`). That part never ran: there was no GPU to try it on.
"""

import os
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from typing import Any

import numpy as np
import psutil

from argosy.observe.columns import Columns

RANK_COLUMNS = {
    "time": "<i8",
    "rank": "<i4",
    "generation": "<i4",
    "cpu_ns": "<i8",
    "main_cpu_ns": "<i8",
    "run_delay_ns": "<i8",
    "rss_bytes": "<i8",
    "threads": "<i4",
}
"""Since the start of the process: CPU time of all threads, of the main thread, and how long that waited for a core."""
HOST_COLUMNS = {
    "time": "<i8",
    "cpu_percent": "<f4",
    "memory_available_bytes": "<i8",
    "network_bytes": "<i8",
    "disk_bytes": "<i8",
    "pressure_cpu": "<f4",
    "pressure_memory": "<f4",
    "pressure_io": "<f4",
}
"""`pressure_*`: percent of the last 10 seconds in which some process waited for it."""
GPU_COLUMNS = {
    "time": "<i8",
    "gpu": "<i4",
    "busy_percent": "<f4",
    "memory_used_bytes": "<i8",
    "power_w": "<f4",
    "temperature_c": "<f4",
}


class HostSamples:
    """Rows that wait to be written."""

    def __init__(self) -> None:
        self._nvml = _open_nvml()
        self._rows: defaultdict[str, list[list[float]]] = defaultdict(list)
        psutil.cpu_percent()

    def sample(self, ranks: Iterable[tuple[int, int, int]]) -> None:
        """Measure now; `ranks` are rank, generation and pid."""
        now = time.monotonic_ns()
        self._rows["host"].append([now, *_host()])
        with suppress(Exception):  # A driver that fails costs these samples alone.
            self._rows["gpu"] += [[now, *row] for row in gpu_rows(self._nvml)]
        for rank, generation, pid in ranks:
            with suppress(psutil.Error, OSError, ValueError):
                self._rows["rank"].append([now, rank, generation, *_process(pid)])

    def take(self) -> dict[str, Columns]:
        """Return the rows since the last call as columns."""
        kinds = {"host": HOST_COLUMNS, "rank": RANK_COLUMNS, "gpu": GPU_COLUMNS}
        found = {
            what: {
                name: np.array(column, dtype)
                for (name, dtype), column in zip(kinds[what].items(), zip(*rows, strict=True), strict=True)
            }
            for what, rows in self._rows.items()
            if rows
        }
        self._rows.clear()
        return found


def _open_nvml() -> Any:
    """NVML, or None where there is no library or no GPU."""
    with suppress(Exception):
        nvml = import_module("pynvml")
        nvml.nvmlInit()
        return nvml
    return None


def gpu_rows(nvml: Any) -> list[list[float]]:
    """What NVML says of each GPU."""
    found: list[list[float]] = []
    if nvml is None:
        return found
    for number in range(nvml.nvmlDeviceGetCount()):
        gpu = nvml.nvmlDeviceGetHandleByIndex(number)
        power, heat = nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3, nvml.nvmlDeviceGetTemperature(gpu, 0)
        used = nvml.nvmlDeviceGetMemoryInfo(gpu).used
        found.append([number, nvml.nvmlDeviceGetUtilizationRates(gpu).gpu, used, power, heat])
    return found


def _process(pid: int) -> list[float]:
    process = psutil.Process(pid)
    with process.oneshot():
        cpu = process.cpu_times()
        rss, threads = process.memory_info().rss, process.num_threads()
    main, delay = 0, 0
    with suppress(OSError, ValueError), open(f"/proc/{pid}/schedstat") as file:
        main, delay, _ = map(int, file.read().split())
    return [int((cpu.user + cpu.system) * 1e9), main, delay, rss, threads]


def _host() -> list[float]:
    network, disk = psutil.net_io_counters(), None
    with suppress(Exception):  # Some containers have no disk statistics.
        disk = psutil.disk_io_counters()
    return [
        psutil.cpu_percent(),
        psutil.virtual_memory().available,
        network.bytes_sent + network.bytes_recv if network else 0,
        disk.read_bytes + disk.write_bytes if disk else 0,
        *(_pressure(what) for what in ("cpu", "memory", "io")),
    ]


def _pressure(what: str) -> float:
    with suppress(OSError, ValueError, IndexError), open(f"/proc/pressure/{what}") as file:
        return float(file.readline().split("avg10=")[1].split()[0])
    return 0.0


def is_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        return os.path.exists(f"/proc/{pid}")
