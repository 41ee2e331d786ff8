"""Compare two runs: what changed in command, code, packages and settings; in scalars, time and ledger. Pure.

C1  A difference in time counts only if it is larger than its own uncertainty.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from argosy.insight.lanes import Class
from argosy.insight.measures import WARM_UP_STEPS
from argosy.insight.opened import OpenedRun

BLOCKS = 20
DRAWS = 2000
CONFIDENCE = 0.95


class StepTime(msgspec.Struct, frozen=True):
    """Median step time of two runs in seconds, and by what share the second is slower, with its bounds."""

    before: float
    after: float
    slower: float
    least: float
    most: float

    @property
    def is_noise(self) -> bool:
        """Whether no difference at all is among the likely values."""
        return self.least <= 0 <= self.most


class GainRecord(msgspec.Struct, frozen=True):
    """A verdict of the first run that the second no longer has: predicted and real gain."""

    kind: str
    predicted: float
    real: float


class Forecast(msgspec.Struct, frozen=True):
    """What a compiled step was predicted to take, before it ran, and what it took; seconds by class of operations."""

    run: str
    recipe: str
    chip: str
    step: tuple[float, float]
    low: float
    high: float
    """The bounds of the predicted 80% interval of the step."""
    classes: dict[str, tuple[float, float]]
    peak_bytes: tuple[float, float]
    """Beyond what is there between steps."""

    @property
    def is_inside(self) -> bool:
        """Whether the step took what the interval said."""
        return self.low <= self.step[1] <= self.high


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """What differs between run A and run B."""

    a: str
    b: str
    changed: dict[str, tuple[str, str]]
    """What the runs were started with, by name."""
    time: StepTime | None
    ledger: dict[str, tuple[float, float]]
    """Seconds per step and rank, by class."""
    scalars: dict[str, tuple[float, float]]
    """Last values."""
    gone: list[GainRecord]
    new: list[str]
    """Kinds of verdicts that only B has."""
    forecasts: list[Forecast] = []
    """Of the runs that compiled their step with `argosy.compile`."""


def compare_runs(a: OpenedRun, b: OpenedRun) -> Comparison:
    """Compare the latest launches of two runs."""
    times = [_step_seconds(run) for run in (a, b)]
    time = step_time(*times) if all(len(each) for each in times) else None
    verdicts = [{verdict.kind: verdict for verdict in run.verdicts()} for run in (a, b)]
    real = -time.slower if time is not None else 0.0
    last = [{name: float(run.scalars(name)[1][-1]) for name in run.scalar_names()} for run in (a, b)]
    return Comparison(
        a=a.name,
        b=b.name,
        changed=_changed(_settings(a), _settings(b)),
        time=time,
        ledger=_ledgers(a, b),
        scalars={name: (last[0][name], last[1][name]) for name in sorted({*last[0]} & {*last[1]})},
        gone=[GainRecord(kind, each.gain, real) for kind, each in verdicts[0].items() if kind not in verdicts[1]],
        new=[kind for kind in verdicts[1] if kind not in verdicts[0]],
        forecasts=[each for run in (a, b) for each in run_forecasts(run)],
    )


def run_forecasts(run: OpenedRun) -> list[Forecast]:
    """Predictions that rank 0 recorded beside what happened, in the latest launch."""
    found: list[Forecast] = []
    for entry in run.data.launches[-1].journal if run.data.launches else ():
        if entry["rank"] == 0 and entry.get("kind") == "prediction":
            wanted, got = entry["predicted"], entry["measured"]
            classes = {**wanted["classes"], **got.get("classes", {})}
            found.append(
                Forecast(
                    run=run.name,
                    recipe=entry["recipe"],
                    chip=entry["chip"],
                    step=(wanted["step_s"], got["step_s"]),
                    low=wanted["low_s"],
                    high=wanted["high_s"],
                    classes={k: (wanted["classes"].get(k, 0.0), got.get("classes", {}).get(k, 0.0)) for k in classes},
                    peak_bytes=(wanted["peak_bytes"], got.get("peak_bytes", 0.0)),
                )
            )
    return found


def step_time(before: NDArray[np.float64], after: NDArray[np.float64]) -> StepTime:
    """Compare two series of step times; blocks of steps are drawn, since neighbours are not independent."""
    middle = float(np.median(before)), float(np.median(after))
    chance = np.random.default_rng(0)
    draws: list[NDArray[np.float64]] = []
    for series in (before, after):
        blocks = np.array([np.median(block) for block in np.array_split(series, min(BLOCKS, len(series)))])
        picks = chance.integers(0, len(blocks), (DRAWS, len(blocks)))
        draws.append(np.median(blocks[picks], axis=1))
    ratio = draws[1] / np.maximum(draws[0], 1e-12) - 1
    outside = (1 - CONFIDENCE) / 2
    least, most = (float(np.quantile(ratio, each)) for each in (outside, 1 - outside))
    return StepTime(*middle, middle[1] / max(middle[0], 1e-12) - 1, least, most)


def _step_seconds(run: OpenedRun) -> NDArray[np.float64]:
    """The time of each steady step: of the rank that needed longest."""
    if not run.ledgers or not len(run.ledgers[-1].steps.step):
        return np.zeros(0)
    steps = run.ledgers[-1].steps
    numbers, place = np.unique(steps.step, return_inverse=True)
    longest = np.zeros(len(numbers))
    np.maximum.at(longest, place, steps.lasted / 1e9)
    return longest[WARM_UP_STEPS:]


def _ledgers(a: OpenedRun, b: OpenedRun) -> dict[str, tuple[float, float]]:
    means: list[NDArray[np.float64]] = []
    for run in (a, b):
        spent = run.ledgers[-1].steps.spent if run.ledgers else np.zeros((0, len(Class)))
        means.append(spent.mean(axis=0) / 1e9 if len(spent) else np.zeros(len(Class)))
    return {
        kind.name.lower(): (float(means[0][kind]), float(means[1][kind]))
        for kind in Class
        if means[0][kind] or means[1][kind]
    }


def _settings(run: OpenedRun) -> dict[str, str]:
    """What a run was started with, flattened."""
    record, found = run.data.record, dict[str, Any]()
    found["command"] = " ".join(record.argv[1:])
    found["ranks"] = record.size
    start = run.start_facts()
    git = start.get("git", {})
    found["git.commit"] = git.get("commit", "")[:12] + (" (changed)" if git.get("dirty") else "")
    if git.get("diff_bytes"):
        found["git.diff"] = f"{git['diff_bytes']} bytes"
    found |= {f"package.{name}": version for name, version in start.get("packages", {}).items()}
    found |= {f"hardware.{name}": value for name, value in start.get("hardware", {}).items() if name != "memory_bytes"}
    for entry in run.data.launches[-1].journal if run.data.launches else ():
        if entry["rank"] == 0 and entry.get("kind") in ("config", "start"):
            _flatten(entry.get("config") or entry.get("environment") or {}, entry["kind"], found)
    return {name: str(value) for name, value in found.items()}


def _flatten(value: object, name: str, found: dict[str, Any]) -> None:
    if isinstance(value, Mapping):
        for key, each in value.items():  # pyright: ignore[reportUnknownVariableType]
            _flatten(each, f"{name}.{key}", found)  # pyright: ignore[reportUnknownArgumentType]
    else:
        found[name] = value


def _changed(a: Mapping[str, str], b: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    names = [*a, *(name for name in b if name not in a)]
    return {name: (a.get(name, "-"), b.get(name, "-")) for name in names if a.get(name) != b.get(name)}
