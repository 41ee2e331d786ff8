"""Score the formula of `megatron` on measured steps: errors on sizes that a fit never saw, regret of its choice."""

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from argosy.core import ConfigError
from argosy.cost.megatron import NAMES, PEAK, VOCABULARY, Array, Rows, fit, shipped_constants, step_seconds

COLUMNS = ("gpus", "global_batch", "micro_batch", "hidden", "heads", "layers", "seq", "tp", "dp", "pp", "iteration_ms")


@dataclass(frozen=True, slots=True)
class Score:
    """How well predictions of one set of rows met what was measured."""

    set: str
    rows: int
    error: float
    """The mean of |predicted / measured - 1|."""
    flat: float
    """The same, of the best single utilisation for all rows."""
    regret: float
    """How much slower the chosen recipe was than the best one, the mean over jobs."""


def read_rows(path: str) -> tuple[Rows, Array]:
    """Read a file in the format of vTrain's rows: the columns, and the measured seconds.

    Raises:
        ConfigError: the file or a column is missing, or a cell is no number.
    """
    if not Path(path).is_file():
        raise ConfigError(f"no such file: {path}")
    with open(path, newline="") as file:
        lines = list(csv.DictReader(file))
    missing = [name for name in ("set", *COLUMNS) if lines and name not in lines[0]]
    if not lines or missing:
        raise ConfigError(f"not a file of measured steps: {path}", hint=f"missing: {', '.join(missing) or 'all rows'}")
    try:
        rows = {name: np.array([float(line[name]) for line in lines]) for name in COLUMNS}
    except ValueError as error:
        raise ConfigError(f"a cell is no number: {path}: {error}") from error
    rows["multi"] = np.array([float(line["set"] == "multi") for line in lines])
    return rows, rows["iteration_ms"] / 1e3


def score(rows: Rows, seconds: Array, predicted: Array) -> list[Score]:
    """Score predictions, apart for runs on one host and on several."""
    found: list[Score] = []
    for name, value in (("multi", 1.0), ("single", 0.0)):
        here = rows["multi"] == value
        if not here.any():
            continue
        part = {key: column[here] for key, column in rows.items()}
        flat = flops(part) / (part["gpus"] * PEAK)
        flat *= np.median(seconds[here] / flat)
        error = float(np.abs(predicted[here] / seconds[here] - 1).mean())
        guess = float(np.abs(flat / seconds[here] - 1).mean())
        found.append(Score(name, int(here.sum()), error, guess, regret(part, seconds[here], predicted[here])))
    return found


def flops(rows: Rows) -> Array:
    """Operations of a step with full recomputation."""
    h, layers, s = rows["hidden"], rows["layers"], rows["seq"]
    return 96 * rows["global_batch"] * s * layers * h**2 * (1 + s / (6 * h) + VOCABULARY / (16 * layers * h))


def regret(rows: Rows, seconds: Array, predicted: Array) -> float:
    jobs: dict[tuple[float, ...], list[int]] = {}
    for index, job in enumerate(zip(*(rows[k] for k in ("hidden", "layers", "gpus", "global_batch")), strict=True)):
        jobs.setdefault(job, []).append(index)
    lost = [seconds[min(r, key=lambda i: predicted[i])] / seconds[r].min() - 1 for r in jobs.values() if len(r) > 1]
    return float(np.mean(lost)) if lost else 0.0


def leave_sizes_out(rows: Rows, seconds: Array, fitted: Callable[[Rows, Array], Array] = fit) -> Array:
    """Predict the rows of each model size by constants that were fitted to all other sizes.

    Raises:
        ConfigError: there is only one size.
    """
    sizes = rows["hidden"] * 1e4 + rows["layers"]
    if len(np.unique(sizes)) < 2:
        raise ConfigError("leaving sizes out needs rows of two model sizes or more")
    predicted = np.zeros(len(seconds))
    for size in np.unique(sizes):
        out = sizes == size
        kept = {name: column[~out] for name, column in rows.items()}
        predicted[out] = step_seconds(fitted(kept, seconds[~out]), {name: c[out] for name, c in rows.items()})
    return predicted


def score_shipped(rows: Rows, seconds: Array) -> list[Score]:
    """Score the shipped constants; no row of the file is fitted."""
    return score(rows, seconds, step_seconds(shipped_constants(), rows))


CONSTANTS = len(NAMES)
