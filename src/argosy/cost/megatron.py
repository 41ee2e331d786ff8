"""The step time of a GPT under Megatron-LM on A100 hosts, as a closed formula of ten fitted constants.

It serves to score the price model on published measurements (vTrain's rows); `argosy plan` prices captured graphs
instead. Full recomputation, gradients summed in fp32 after the last micro-batch, no overlap.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Rows = Mapping[str, Array]
"""Columns by name, as in the file, numbers only; `multi` is 1 for runs over several hosts."""

VOCABULARY = 51_200.0
PEAK, BANDWIDTH = 312e12, 1.935e12
HOST = 8
NVLINK_HOP = 200e9
SHARPNESS = 2.25
"""How abruptly a layer turns from bound by launching kernels to bound by running them; chosen by hand."""
NAMES = (
    *("matmul", "layer_passes", "attention_passes", "loss_passes", "launch_s", "launch_tp"),
    *("nvlink_slowdown", "nic", "update_passes", "stage_s"),
)
PRIOR = np.log(np.array([0.75, 4.0, 8.0, 18.0, 3.1e-3, 0.05, 1.0, 80e9, 0.4, 0.5e-3]))
"""Where the fit starts and is pulled to. Physically plausible, but chosen by hand with the measured rows in sight."""
STRENGTH = np.array([3.0, 1.0, 2.0, 1.0, 1.0, 1.0, 5.0, 5.0, 1.0, 1.0])
PRIOR_WEIGHT = 0.2

NVLINK = {  # ranks: latency in s, s per byte; by least squares on vTrain's NCCL table, not on steps.
    2: (45.97e-6, 5.183e-12),
    3: (55.68e-6, 6.359e-12),
    4: (53.99e-6, 6.868e-12),
    5: (59.02e-6, 7.200e-12),
    6: (67.25e-6, 7.425e-12),
    7: (70.68e-6, 7.580e-12),
    8: (78.61e-6, 7.699e-12),
}


def nvlink_all_reduce(ranks: Array, bytes_: Array) -> Array:
    latency = np.array([NVLINK.get(int(n), (0.0, 0.0))[0] for n in ranks])
    per_byte = np.array([NVLINK.get(int(n), (0.0, 0.0))[1] for n in ranks])
    return latency + per_byte * bytes_


def step_seconds(logs: Array, rows: Rows) -> Array:
    """Seconds of a step for each row; `logs` are the logarithms of the constants."""
    constant = dict(zip(NAMES, np.exp(logs), strict=True))
    b, h, heads, layers, s = (rows[k] for k in ("micro_batch", "hidden", "heads", "layers", "seq"))
    t, d, p, multi = rows["tp"], rows["dp"], rows["pp"], rows["multi"]
    micros = rows["global_batch"] / (d * b)
    tokens, inside = b * s, np.minimum(t, HOST)
    compute = PEAK * constant["matmul"]
    layer = (24 * tokens * h * h + 4 * tokens * s * h) / t / compute
    scores = b * heads / t * s * s
    layer += 2 * (constant["layer_passes"] * tokens * h + constant["attention_passes"] * scores) / BANDWIDTH
    near = constant["nvlink_slowdown"] * nvlink_all_reduce(inside, tokens * h * 2)
    far = 2 * (t - 1) / t * tokens * h * 2 / constant["nic"]
    reduce = np.where(t > 1, np.where(t > HOST, far, near), 0.0)
    running = 4 * layer + 6 * reduce  # Forward, again for the backward pass, and twice the forward for it.
    launching = constant["launch_s"] * (1 + constant["launch_tp"] * (inside - 1))
    each = (running**SHARPNESS + launching**SHARPNESS) ** (1 / SHARPNESS)
    head = 6 * tokens * VOCABULARY / t * h / compute + constant["loss_passes"] * tokens * VOCABULARY / t * 4 / BANDWIDTH
    stage = layers / p * each
    flow = micros * (stage + head) + (p - 1) * stage
    hop = tokens * h * 2 / np.where(multi > 0, inside * constant["nic"] / HOST, NVLINK_HOP)
    flow += np.where(p > 1, (constant["stage_s"] + hop) * 2 * (micros + p - 1), 0.0)
    parameters = (layers / p * 12 * h * h + VOCABULARY * h) / t
    local = np.minimum(d, np.maximum(1.0, HOST / t))
    hosts = d / local
    latency_free = nvlink_all_reduce(local, parameters * 4) - nvlink_all_reduce(local, parameters * 0)
    gradient = latency_free + 2 * (hosts - 1) / hosts * parameters * 4 * inside / constant["nic"]
    return flow + gradient + constant["update_passes"] * parameters * 20 / BANDWIDTH


def fit(rows: Rows, seconds: Array) -> Array:
    """Fit the constants to measured seconds: least absolute error of logarithms, both sets weighing the same."""
    multi = rows["multi"] > 0
    weight = np.where(multi, 1 / np.sqrt(max(multi.sum(), 1)), 1 / np.sqrt(max((~multi).sum(), 1)))
    pull = PRIOR_WEIGHT * STRENGTH * np.sqrt((weight**2).sum() / len(PRIOR))
    logs, weights = PRIOR.copy(), weight

    def residuals(at: Array) -> Array:
        return np.concatenate([np.log(step_seconds(at, rows) / seconds) * weights, pull * (at - PRIOR)])

    for _ in range(5):
        logs = descend(residuals, logs)
        error = np.abs(np.log(step_seconds(logs, rows) / seconds))
        weights = weight / np.sqrt(np.maximum(error, 0.01))  # Squares of these are absolute errors.
    return logs


def descend(residuals: Callable[[Array], Array], start: Array) -> Array:
    """Levenberg and Marquardt's method, at most 25 steps."""
    at, damping = start, 1e-2
    found = residuals(at)
    for _ in range(25):
        slope = np.stack([(residuals(at + 1e-4 * unit) - found) / 1e-4 for unit in np.eye(len(at))], axis=1)
        square = slope.T @ slope
        move = np.linalg.solve(square + damping * np.diag(np.diag(square) + 1e-9), -slope.T @ found)
        tried = residuals(at + np.clip(move, -1, 1))
        if tried @ tried < found @ found:
            small = found @ found - tried @ tried < 1e-7 * (found @ found)
            at, found, damping = at + np.clip(move, -1, 1), tried, max(damping / 3, 1e-9)
            if small:
                break
        else:
            damping *= 4
            if damping > 1e6:
                break
    return at


def shipped_constants() -> Array:
    """The constants that were fitted to the rows of vTrain that come with the tests."""
    data = tomllib.loads((Path(__file__).parent / "megatron_a100.toml").read_text())
    return np.log(np.array([float(data["constants"][name]) for name in NAMES]))
