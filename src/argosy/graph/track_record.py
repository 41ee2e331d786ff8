"""A compiled step's prediction beside what happened, op class by op class, in the journal of the run.

The prediction is fixed when the step is compiled, before any of its steps runs. One early step runs under torch's
profiler; the following ones are timed. `argosy compare` prints what both runs recorded.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import math
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from argosy.cost import INTERVAL, SPREAD, Chip, estimate, memory_profile
from argosy.graph import _torch
from argosy.graph.lowering import lower
from argosy.graph.step_capture import StepGraph
from argosy.observe import rank_journal

PROFILED, TIMED = 3, 20
"""The number of the step that is profiled, and how many of the following are timed."""
CLASSES = {
    "collective": ("_c10d_functional", "c10d::", "wait_tensor"),
    "attention": ("attention",),
    "matmul": ("mm", "linear_cross_entropy", "convolution", "linear_token_logprob"),
}


def class_of(name: str) -> str:
    """The op class of an operation by its name; what is neither a product nor a collective moves memory."""
    return next((kind for kind, words in CLASSES.items() if any(word in name for word in words)), "memory")


def predicted_step(step: StepGraph, chip: Chip) -> dict[str, Any]:
    """Seconds of the step with an 80% interval, seconds by class, peak bytes."""
    trace = lower(step)
    found = estimate(trace, step.recipe, chip)
    seconds: dict[str, float] = {}
    squares = 0.0
    for key, value in found.items():
        if key.startswith("part:"):
            _, kind, tier = key.split(":")
            if kind != "optimizer":
                seconds[kind] = seconds.get(kind, 0.0) + value
                squares += (value * SPREAD[tier]) ** 2
    whole = found["forward"] + found["backward"]
    width = INTERVAL * math.sqrt(squares)
    profile = memory_profile(trace)
    return {
        "step_s": whole,
        "low_s": max(whole - width, whole / 4),
        "high_s": whole + width,
        "classes": {kind: value for kind, value in seconds.items() if value > 0},
        "peak_bytes": profile.peak - sum(profile.resident.values()),
    }


class TrackRecord:
    """Watches the first steps, then writes one record and is done."""

    def __init__(self, predicted: dict[str, Any], recipe: str, chip: str, regions: int) -> None:
        self._about = {"recipe": recipe, "chip": chip, "compiled_regions": regions, "predicted": predicted}
        self._count = 0
        self._times: list[float] = []
        self._measured: dict[str, Any] = {}
        self.done = False
        self.found: dict[str, Any] = {}
        """The record, once it is written."""

    def watch(self, run: Callable[[], Tensor]) -> Tensor:
        """Run one step; what goes wrong with the watching never reaches it."""
        self._count += 1
        if self._count == PROFILED and not _torch.profiler_enabled():
            result, self._measured = profiled(run)
            return result
        began = time.perf_counter()
        result = run()
        if self._count > PROFILED:
            self._times.append(time.perf_counter() - began)
        if len(self._times) == TIMED:
            self.done = True
            measured = {**self._measured, "step_s": statistics.median(self._times)}
            self.found = {**self._about, "measured": measured}
            rank_journal.write("prediction", **self.found)
        return result


def profiled(run: Callable[[], Tensor]) -> tuple[Tensor, dict[str, Any]]:
    """Run a step under torch's profiler: seconds by class on this thread, and the peak of what it allocates."""
    results: list[Tensor] = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        began = time.perf_counter()
        results.append(run())
        whole = time.perf_counter() - began
    classes: dict[str, float] = {}
    events: Any = profile.events() or ()
    thread = max((e.thread for e in events if "gloo" not in e.name), key=lambda t: work_of(events, t), default=None)
    for event in events:
        if event.thread == thread and not event.name.startswith(("gloo", "[memory]")):
            kind = class_of(event.name)
            classes[kind] = classes.get(kind, 0.0) + event.self_cpu_time_total / 1e6
    classes["between operations"] = max(0.0, whole - sum(classes.values()))
    return results[0], {"classes": classes, "peak_bytes": peak_of(_torch.memory_changes(profile))}


def work_of(events: Iterable[Any], thread: Any) -> float:
    return sum(event.self_cpu_time_total for event in events if event.thread == thread)


def peak_of(changes: Iterable[int]) -> float:
    """The highest sum of allocations and releases, in order."""
    live = peak = 0
    for each in changes:
        live += each
        peak = max(peak, live)
    return float(peak)
