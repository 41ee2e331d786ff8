"""What a profiler trace shows: how busy devices are, what overlaps, which kernels and operators cost most. Pure.

The definitions are those of Holistic Trace Analysis: on a device, time from the first kernel to the end of the last.
"""

import msgspec
import numpy as np
from numpy.typing import NDArray

from argosy.insight.kineto import KinetoTrace
from argosy.insight.verdicts import Verdict

Floats = NDArray[np.float64]
COMMUNICATION = ("nccl", "rccl", "oneccl", "nvshmem")
TOP = 20
SMALL_US = 10.0


class Cost(msgspec.Struct, frozen=True):
    """A kernel or operator: how often, how long in all, and the median."""

    name: str
    count: int
    total_us: float
    median_us: float


class TraceSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Shares are of `total_us`. `devices` is False if the trace has no kernels: then operators of the CPU count."""

    path: str
    devices: bool
    total_us: float
    busy_us: float
    compute_us: float
    """Covered by kernels that compute."""
    communication_us: float
    overlap_us: float
    """Covered by both."""
    copy_us: float
    steps: list[float]
    """Microseconds of each ProfilerStep."""
    data_us: float
    """Waiting for the DataLoader."""
    kernels: list[Cost]
    operators: list[Cost]
    median_kernel_us: float
    damage: list[str] = []

    @property
    def idle_us(self) -> float:
        return self.total_us - self.busy_us


def union(begin: Floats, end: Floats) -> tuple[Floats, Floats]:
    """Disjoint intervals that cover the same time, in order."""
    if not len(begin):
        return begin, end
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], np.maximum.accumulate(end[order])
    starts = np.concatenate([[True], begin[1:] > end[:-1]])
    return begin[starts], np.concatenate([end[:-1][starts[1:]], end[-1:]])


def length(intervals: tuple[Floats, Floats]) -> float:
    """The time that disjoint intervals cover."""
    return float((intervals[1] - intervals[0]).sum())


def overlap(a: tuple[Floats, Floats], b: tuple[Floats, Floats]) -> float:
    """The time that two sets of disjoint intervals both cover."""
    both = union(np.concatenate([a[0], b[0]]), np.concatenate([a[1], b[1]]))
    return length(a) + length(b) - length(both)


def summarise(trace: KinetoTrace) -> TraceSummary:
    """Measure one trace."""
    end = trace.begin + trace.lasted
    kernel, copy = trace.of("kernel"), trace.of("gpu_memcpy", "gpu_memset")
    on_device = kernel | copy
    devices = bool(on_device.any())
    operator = trace.of("cpu_op")
    chosen = on_device if devices else operator if operator.any() else np.ones(len(trace.begin), bool)
    numbers = [n for n, name in enumerate(trace.names) if any(word in name.lower() for word in COMMUNICATION)]
    is_comm = kernel & np.isin(trace.name, numbers)
    busy = union(trace.begin[chosen], end[chosen])
    compute = union(trace.begin[kernel & ~is_comm], end[kernel & ~is_comm])
    communication = union(trace.begin[is_comm], end[is_comm])
    steps = trace.of("user_annotation", "cpu_op", "gpu_user_annotation")
    step_ids = [n for n, name in enumerate(trace.names) if name.startswith("ProfilerStep#")]
    on_cpu = steps & np.isin(trace.name, step_ids) & ~trace.of("gpu_user_annotation")
    data_ids = [n for n, name in enumerate(trace.names) if name.startswith("enumerate(DataLoader)")]
    data = np.isin(trace.name, data_ids)
    return TraceSummary(
        path=trace.path,
        devices=devices,
        total_us=float(end[chosen].max() - trace.begin[chosen].min()),
        busy_us=length(busy),
        compute_us=length(compute) if devices else length(busy),
        communication_us=length(communication),
        overlap_us=overlap(compute, communication),
        copy_us=length(union(trace.begin[copy], end[copy])),
        steps=trace.lasted[on_cpu].tolist(),
        data_us=length(union(trace.begin[data], end[data])),
        kernels=_costs(trace, on_device, trace.lasted),
        operators=_costs(trace, operator, _own_time(trace, operator)),
        median_kernel_us=float(np.median(trace.lasted[kernel])) if kernel.any() else 0.0,
        damage=trace.damage,
    )


def _own_time(trace: KinetoTrace, chosen: NDArray[np.bool_]) -> Floats:
    """The time of each event without that of the events inside it, on its thread."""
    own = trace.lasted.copy()
    for thread in np.unique(trace.thread[chosen]).tolist():
        places = np.flatnonzero(chosen & (trace.thread == thread))
        begin, end = trace.begin[places], (trace.begin + trace.lasted)[places]
        order = np.lexsort((-end, begin))
        stack: list[int] = []
        for at in order.tolist():
            while stack and end[stack[-1]] <= begin[at]:
                stack.pop()
            if stack:
                own[places[stack[-1]]] -= end[at] - begin[at]
            stack.append(at)
    return own


def _costs(trace: KinetoTrace, chosen: NDArray[np.bool_], lasted: Floats) -> list[Cost]:
    if not chosen.any():
        return []
    names, values = trace.name[chosen], lasted[chosen]
    totals = np.bincount(names, values, len(trace.names))
    counts = np.bincount(names, minlength=len(trace.names))
    top: list[int] = [n for n in np.argsort(-totals)[:TOP].tolist() if counts[n]]
    return [Cost(trace.names[n], int(counts[n]), float(totals[n]), float(np.median(values[names == n]))) for n in top]


def judge_trace(summary: TraceSummary) -> list[Verdict]:
    """What holds the traced program back, the most important first; empty if nothing is wrong."""
    total = max(summary.total_us, 1e-9)
    found: list[Verdict] = []

    def add(kind: str, what: str, why: str, do: str, gain: float) -> None:
        found.append(Verdict(kind=kind, what=what, why=why, query="", do=do, gain=gain))

    data = summary.data_us / total
    exposed = (summary.communication_us - summary.overlap_us) / total
    idle = summary.idle_us / total
    if data > 0.05:
        add(
            "input_bound",
            "the program waits for its input",
            f"{data:.0%} of the time is in the DataLoader",
            "load ahead: DataLoader(num_workers=4, persistent_workers=True), or make samples cheaper",
            data,
        )
    if summary.devices and exposed > 0.1:
        hidden = summary.overlap_us / max(summary.communication_us, 1e-9)
        add(
            "communication_bound",
            "communication is not hidden behind computation",
            f"{exposed:.0%} of the time only communication runs; {hidden:.0%} of communication is overlapped",
            "start reductions earlier (DDP buckets, FSDP prefetch), send less, or use larger batches",
            exposed,
        )
    if summary.devices and idle - data > 0.15:
        small = 0 < summary.median_kernel_us < SMALL_US
        add(
            "launch_bound" if small else "host_bound",
            "the device waits for the host",
            f"the device is idle for {idle:.0%} of the time; the median kernel takes {summary.median_kernel_us:.3g} us",
            "fuse kernels: torch.compile(mode='reduce-overhead'), or larger batches"
            if small
            else "look for synchronisation (.item(), .cpu(), print of tensors) and slow Python between operators",
            idle - data,
        )
    if summary.devices and summary.copy_us / total > 0.1:
        add(
            "copy_bound",
            "copies between host and device take time",
            f"{summary.copy_us / total:.0%} of the time is covered by copies",
            "pin memory and copy with non_blocking=True on a side stream; keep data on the device",
            summary.copy_us / total,
        )
    return sorted(found, key=lambda verdict: -verdict.gain)
