"""Model FLOPs utilisation: the operations that the model needs, divided by what the hardware could do meanwhile. Pure.

A backward pass counts as two forward passes; what is computed again for activation checkpointing does not count.
Peaks are dense operations per second as vendors state them; on CPUs the one measured on the machine.
"""

from typing import Any

import msgspec

from argosy.insight.store import LaunchData

PEAKS: dict[str, dict[str, float]] = {
    "H200": {"bfloat16": 989e12, "float16": 989e12, "float32": 67e12},
    "H100 PCIe": {"bfloat16": 756e12, "float16": 756e12, "float32": 51e12},
    "H100": {"bfloat16": 989e12, "float16": 989e12, "float32": 67e12},
    "B200": {"bfloat16": 2250e12, "float16": 2250e12, "float32": 80e12},
    "A100": {"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12},
    "A10G": {"bfloat16": 70e12, "float16": 70e12, "float32": 35e12},
    "A10": {"bfloat16": 125e12, "float16": 125e12, "float32": 31.2e12},
    "L40S": {"bfloat16": 362e12, "float16": 362e12, "float32": 91.6e12},
    "L4": {"bfloat16": 121e12, "float16": 121e12, "float32": 30.3e12},
    "V100": {"float16": 125e12, "float32": 15.7e12},
    "T4": {"float16": 65e12, "float32": 8.1e12},
    "RTX 4090": {"bfloat16": 165e12, "float16": 165e12, "float32": 82.6e12},
    "MI300X": {"bfloat16": 1307e12, "float16": 1307e12, "float32": 163e12},
}
"""By part of the device's name; the first that matches."""


class Utilisation(msgspec.Struct, frozen=True, kw_only=True):
    """What the numbers of one launch say."""

    mfu: float | None = None
    hfu: float | None = None
    """As `mfu`, with the operations as they run: what is computed again counts, what needs no gradient does not."""
    flops_per_step: float | None = None
    """Of one rank."""
    source: str = ""
    """How operations and peak are known."""
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    """Of all ranks."""
    parameters: int | None = None
    memory: dict[str, int] = {}
    """Bytes by role, of the rank that takes most; activations as counted on fake tensors."""


def utilisation(launch: LaunchData, step_s: float, forwards_per_step: float, cpu_peak: float | None) -> Utilisation:
    """Put together what ranks recorded about their model."""
    models = {entry["rank"]: entry for entry in launch.journal if entry.get("kind") == "model"}
    counted = next((entry for entry in launch.journal if entry.get("kind") == "flops"), None)
    if not models or step_s <= 0:
        return Utilisation()
    model = models[min(models)]
    rates = {
        name: sum(int(each.get(name, 0)) for each in models.values())
        * forwards_per_step
        / step_s
        / len(models)
        * launch.size
        for name in ("samples", "tokens")
    }
    peak, source = peak_of(model, cpu_peak)
    flops = None if counted is None else 3 * float(counted["forward"]) * forwards_per_step
    executed = float((counted or {}).get("executed") or 0) * forwards_per_step
    weighed = [entry for entry in launch.journal if entry.get("kind") == "memory"]
    memory = {
        name.removesuffix("_bytes"): max(int(each.get(name, 0)) for each in weighed)
        for name in sorted({name for each in weighed for name in each if name.endswith("_bytes")})
    }
    if (counted or {}).get("activation_bytes"):
        memory["activation"] = int((counted or {})["activation_bytes"])
    return Utilisation(
        mfu=None if flops is None or peak is None else flops / step_s / peak,
        hfu=None if not executed or peak is None else executed / step_s / peak,
        memory=memory,
        flops_per_step=flops,
        source=f"operations counted on fake tensors, {source}" if flops is not None else "",
        samples_per_s=rates["samples"] or None,
        tokens_per_s=rates["tokens"] or None,
        parameters=model.get("parameters"),
    )


def peak_of(model: dict[str, Any], cpu_peak: float | None) -> tuple[float | None, str]:
    """Operations per second that the device of a rank could do, and how that is known."""
    if model.get("device") == "cpu":
        threads = int(model.get("threads") or 1)
        peak = None if cpu_peak is None else cpu_peak * threads
        return peak, f"peak measured on this machine for {threads} thread{'s' * (threads > 1)}"
    name = str(model.get("device_name", ""))
    for part, peaks in PEAKS.items():
        if part in name:
            return peaks.get(str(model.get("dtype"))), f"peak of {part} for {model.get('dtype')}"
    return None, f"peak of {name or 'this device'} is not known"
