"""A run that was opened to be understood: `argosy.open_run("runs/gpt")`."""

import os
import time
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from argosy.core import ConfigError
from argosy.insight.bandwidth import Bandwidth, bus_bandwidth
from argosy.insight.disagreements import judge_collectives
from argosy.insight.ledger import LaunchLedger, make_ledger
from argosy.insight.measures import Measures, measure
from argosy.insight.mfu import utilisation
from argosy.insight.segments import Records, forget_damaged, records_of
from argosy.insight.sql import Answer, parquet_writer, query
from argosy.insight.store import RunData, load_run, metrics_folders
from argosy.insight.tables import tables_of
from argosy.insight.verdicts import Verdict, judge
from argosy.observe import Columns
from argosy.supervise import find_run


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """How fast the latest launch is; None where it is not known."""

    steps: int
    step_s: float | None = None
    """Median of the steady steps."""
    steps_per_s: float | None = None
    goodput: float
    """Share of all rank seconds spent on work that counts."""
    mfu: float | None = None
    mfu_source: str = ""
    hfu: float | None = None
    memory: dict[str, int] = {}
    """Bytes by role."""
    tokens_per_s: float | None = None
    samples_per_s: float | None = None
    parameters: int | None = None


class OpenedRun:
    """What a run recorded, as it was when it was opened."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.data: RunData = load_run(directory, time.time())

    @property
    def name(self) -> str:
        return self.data.record.name

    @property
    def damage(self) -> list[str]:
        """What could not be read, one line each."""
        return self.data.damage

    @cached_property
    def ledgers(self) -> list[LaunchLedger]:
        """One per launch, oldest first."""
        return make_ledger(self.data)

    @cached_property
    def measures(self) -> Measures | None:
        """Numbers about the steady steps of the latest launch, if it has enough of them."""
        return measure(self.data.launches[-1], self.ledgers[-1]) if self.ledgers else None

    @cached_property
    def tables(self) -> dict[str, Columns]:
        """What `sql` can ask for."""
        return tables_of(self.data, self.ledgers)

    @property
    def begins(self) -> dict[int, int]:
        """When each launch began, in ns since the epoch."""
        return {launch.number: launch.begin for launch in self.data.launches}

    @property
    def has_steps(self) -> bool:
        """Whether anything was recorded that a ledger can be made of."""
        return any(len(ledger.steps.rank) for ledger in self.ledgers)

    def ledger(self) -> dict[int, dict[str, float]]:
        """Seconds by class of each rank, over all launches."""
        found: dict[int, dict[str, float]] = {}
        for each in self.ledgers:
            for row in each.rows:
                mine = found.setdefault(row.rank, {})
                for kind, ns in row.totals().items():
                    mine[kind.name.lower()] = mine.get(kind.name.lower(), 0.0) + ns / 1e9
        return found

    def verdicts(self) -> list[Verdict]:
        """What holds the latest launch back, the most important first; empty if nothing is wrong."""
        if not self.ledgers:
            return []
        return judge_collectives(self.data.launches[-1]) + judge(self.measures, self.ledgers[-1])

    def speed(self) -> Speed:
        """How fast the latest launch is."""
        if not self.ledgers:
            return Speed(steps=0, goodput=0.0)
        last, measures = self.ledgers[-1], self.measures
        steps = int(last.steps.step.max()) if len(last.steps.step) else 0
        if measures is None:
            return Speed(steps=steps, goodput=last.goodput)
        peak = self._json("peak.json").get("cpu_flops_per_core")
        model = utilisation(self.data.launches[-1], measures.step_s, measures.forwards, peak)
        return Speed(
            steps=steps,
            step_s=measures.step_s,
            steps_per_s=1 / max(measures.step_s, 1e-9),
            goodput=last.goodput,
            mfu=model.mfu,
            mfu_source=model.source,
            hfu=model.hfu,
            memory=model.memory,
            tokens_per_s=model.tokens_per_s,
            samples_per_s=model.samples_per_s,
            parameters=model.parameters,
        )

    def bandwidth(self) -> list[Bandwidth]:
        """How fast the collectives of the latest launch moved data."""
        return bus_bandwidth(self.data.launches[-1], self.ledgers[-1]) if self.ledgers else []

    def start_facts(self) -> dict[str, Any]:
        """What the latest launch started with: command, code, packages, hardware."""
        return self._json("start.json")

    def _json(self, name: str) -> dict[str, Any]:
        for launch in self.data.launches[-1:]:
            for folder, _ in metrics_folders(self.directory, launch.number):
                with suppress(OSError, msgspec.MsgspecError):
                    return msgspec.json.decode((folder / name).read_bytes(), type=dict[str, Any])
        return {}

    def scalar_names(self) -> list[str]:
        """The names of all scalars."""
        return sorted({name for _, _, values in self.data.scalars for name in values})

    def scalars(self, name: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Steps and values of a scalar."""
        rows = [(step, values[name]) for step, _, values in self.data.scalars if name in values]
        return np.array([row[0] for row in rows], np.int64), np.array([row[1] for row in rows], np.float64)

    def sql(self, text: str) -> Answer:
        """Answer one SELECT about the run's tables, and `records`: all that ranks recorded, up to now.

        Raises:
            ConfigError: DuckDB is missing, or the statement is refused or wrong.
        """
        if "records" not in text.lower():
            return query(self.tables, text)
        try:
            return query(self.tables, text, self._records())
        except ConfigError:
            damaged = [forget_damaged(spans) for spans, _, _ in self._spans()]
            if not any(damaged):
                raise
        return query(self.tables, text, self._records())

    def _spans(self) -> list[tuple[Path, int, int]]:
        """The files of all hosts, with the launch and the time by their own clock at which it began."""
        return [
            (folder / "spans", launch.number, launch.begin + ahead_ns)
            for launch in self.data.launches
            for folder, ahead_ns in metrics_folders(self.directory, launch.number)
            if (folder / "spans").exists()
        ]

    def _records(self) -> list[Records]:
        write = parquet_writer()
        return [records_of(spans, launch, begin, write) for spans, launch, begin in self._spans()]

    def plot(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Write the report page (by default `report.html` in the run's directory) and return its path."""
        from argosy.insight.report import write_report

        return write_report(self, Path(path) if path is not None else self.directory / "report.html")


def open_run(run: str | os.PathLike[str] = "last") -> OpenedRun:
    """Open a run by directory, name, prefix, or `last`.

    Raises:
        ConfigError: there is no such run.
    """
    return OpenedRun(find_run(os.fspath(run)))
