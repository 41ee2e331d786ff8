"""What callers say of a save, checked before anything is begun. Pure."""

import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from argosy.checkpoint.retention import Cadence, Keep
from argosy.core import ConfigError

STEP_MAX = 10**12 - 1
"""The names of steps have twelve digits."""


def checked_step(step: Any) -> int:
    """A step as an int; tensors and numpy scalars of one integer will do."""
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except (TypeError, ValueError, RuntimeError):
        number = -1
    if not 0 <= number <= STEP_MAX:
        raise ConfigError(f"a step is a whole number from 0 to {STEP_MAX:,}: {step!r}")
    return number


def checked_metrics(metrics: Any) -> dict[str, float]:
    """Metrics as floats, without those that are no finite number."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise ConfigError(f"metrics are a dict of numbers by name: {metrics!r}")
    found: dict[str, float] = {}
    for name, value in metrics.items():  # pyright: ignore[reportUnknownVariableType]
        try:
            if not isinstance(name, str) or not hasattr(value, "__float__"):  # pyright: ignore[reportUnknownArgumentType]
                raise TypeError
            found[name] = float(value)  # pyright: ignore[reportUnknownArgumentType]
        except (TypeError, ValueError, RuntimeError):
            raise ConfigError(f"the metric {name!r} is no number: {value!r}") from None
    return {name: value for name, value in found.items() if math.isfinite(value)}


def checked_tags(tag: Any) -> list[str]:
    """The tags of a step."""
    if tag is not None and (not isinstance(tag, str) or not tag):
        raise ConfigError(f"a tag is a text of at least one letter: {tag!r}")
    return [] if tag is None else [tag]


def checked_keep(keep: Any) -> tuple[Keep, ...]:
    """The policies by which steps are kept."""
    kinds = get_args(Keep)
    known = tuple(keep) if isinstance(keep, Iterable) else (keep,)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    for each in known:  # pyright: ignore[reportUnknownVariableType]
        if not isinstance(keep, Iterable) or not isinstance(each, kinds):
            names = ", ".join(kind.__name__ for kind in kinds)
            raise ConfigError(f"keep= is a list of {names}: {keep!r}", hint="keep=[KeepLast(3)], for example")
    return known  # pyright: ignore[reportUnknownVariableType]


def checked_keeping(keeping: Any) -> Any:
    """How the keeper holds snapshots."""
    if keeping is not None and not hasattr(keeping, "bytes_max"):
        raise ConfigError(f"keeping= is a Keeping: {keeping!r}", hint="Keeping(), for example")
    return keeping


def checked_cadence(cadence: Any) -> Cadence:
    """How often saves are due; every 500 steps if nobody says."""
    if cadence is not None and not isinstance(cadence, Cadence):
        raise ConfigError(f"cadence= is a Cadence: {cadence!r}", hint="Cadence(every_steps=500), for example")
    return cadence or Cadence(every_steps=500)
