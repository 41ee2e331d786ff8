"""What a run logs: rows of numbers by step, in a journal; after a rollback or a resume the newer row counts.

R1  A row is written when its step has committed, once.
"""

import math
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from argosy.core import ConfigError
from argosy.observe import Journal, read_journal

FILE = "metrics/log"
HIGHEST = " highest"
"""After the name of a value of which the highest is the best."""


class Row(msgspec.Struct, frozen=True, tag="row"):
    """Numbers of one step."""

    step: int
    at: float
    values: dict[str, float]


class WentBack(msgspec.Struct, frozen=True, tag="back"):
    """Training goes on after `step`: later rows before this record do not count."""

    step: int
    at: float
    reason: str = ""


_decoder: msgspec.msgpack.Decoder[Row | WentBack] = msgspec.msgpack.Decoder(Row | WentBack)


def at_call(name: str, value: Any) -> Any:
    """A value as it is now: a number, or a copy of a tensor on an accelerator, which is read later: that may wait.

    Raises:
        ConfigError: it is no number.
    """
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        value = value.detach()
        return float(value) if type(value) is Tensor and value.is_cpu else value.clone()
    if hasattr(value, "__float__") and not isinstance(value, Tensor):
        with suppress(TypeError, ValueError):
            return float(value)
    raise ConfigError(f"run.log takes numbers: {name}={value!r:.80}", hint="keep other things in run.state")


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Values as numbers; tensors of one element are read, which waits for an accelerator.

    Raises:
        TypeError, ValueError: one is no number.
    """
    return {name: float(value) for name, value in values.items()}


class Log:
    """The writing end, of rank 0. `also` is the directory where the launch is recorded, if it is another one."""

    def __init__(self, directory: Path, also: Path | None = None) -> None:
        self._path = directory / FILE
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._journal = Journal(self._path)
        self._copy: Journal | None = None
        if also is not None and also.resolve() != directory.resolve():
            with suppress(OSError):  # For reports alone.
                (also / FILE).parent.mkdir(parents=True, exist_ok=True)
                self._copy = Journal(also / FILE)

    def write(self, record: Row | WentBack) -> None:
        """Add a record.

        Raises:
            OSError: there is no room.
        """
        self._journal.append(msgspec.msgpack.encode(record))
        if self._copy is not None:
            with suppress(OSError):
                self._copy.append(msgspec.msgpack.encode(record))

    def is_there(self) -> bool:
        """Whether the file can still be found where it was made."""
        return self._journal.is_at(self._path)

    def close(self) -> None:
        self._journal.close()
        if self._copy is not None:
            self._copy.close()


def read_log(directory: str | Path) -> list[Row]:
    """The rows of a run that count, in order of their steps."""
    path = Path(directory) / FILE
    if not path.exists():
        return []
    return settle_rows(_decoder.decode(record) for record in read_journal(path))


def settle_rows(records: Iterable[Row | WentBack]) -> list[Row]:
    """The rows that count: several of one step are one, the newer values win."""
    rows: dict[int, Row] = {}
    for record in records:
        if isinstance(record, WentBack):
            rows = {step: row for step, row in rows.items() if step <= record.step}
        elif record.step in rows:
            rows[record.step] = Row(record.step, record.at, {**rows[record.step].values, **record.values})
        else:
            rows[record.step] = record
    return [rows[step] for step in sorted(rows)]


class Best(msgspec.Struct):
    """The best value of something logged, and how many times it was logged since."""

    value: float = math.nan
    step: int = -1
    age: int = 0

    def see(self, value: float, step: int, *, highest: bool) -> None:
        better = math.isnan(self.value) or (value > self.value if highest else value < self.value)
        if better and not math.isnan(value):
            self.value, self.step, self.age = value, step, 0
        else:
            self.age += 1


class Line:
    """The line about progress: now and then, with rate and time left."""

    def __init__(self, every_s: float = 10.0) -> None:
        self._every_s = every_s
        self._at, self._step = time.monotonic(), -1

    def due(self, step: int, until: int | None, values: Mapping[str, float], now: float) -> str:
        """The line to print at `now`, or nothing."""
        if self._step < 0:
            self._step, self._at = step, now
        if now - self._at < self._every_s:
            return ""
        rate = (step - self._step) / (now - self._at)
        self._step, self._at = step, now
        parts = [f"step {step:,}" + (f" of {until:,}" if until else "")]
        parts += [f"{name} {value:.4g}" for name, value in values.items()]
        parts.append(f"{rate:.3g} steps/s")
        if until and rate > 0:
            parts.append(f"{_duration((until - step) / rate)} left")
        return " · ".join(parts)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
