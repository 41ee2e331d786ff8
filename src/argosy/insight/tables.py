"""A run as tables, for SQL and exports: columns of numpy. Pure.

Times are seconds since the beginning of the launch, `at` seconds since the epoch.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argosy.insight.lanes import COLLECTIVES, ONE_WAY, Class
from argosy.insight.ledger import LaunchLedger
from argosy.insight.measures import spans_of
from argosy.insight.store import LaunchData, RunData
from argosy.observe import Columns, SpanKind

TABLES = ("ledger", "segments", "steps", "waits", "spans", "collectives", "scalars", "rank_samples", "host_samples")
_CLASSES = np.array([*(kind.name.lower() for kind in Class), "unresolved"], object)


def tables_of(run: RunData, ledgers: Sequence[LaunchLedger]) -> dict[str, Columns]:
    """All tables of a run, over all its launches."""
    found: dict[str, list[Columns]] = {name: [] for name in TABLES}
    for launch, ledger in zip(run.launches, ledgers, strict=True):
        for name, columns in _launch_tables(launch, ledger).items():
            rows = len(next(iter(columns.values())))
            found[name].append({"launch": np.full(rows, launch.number, np.int32), **columns})
    joined = {
        name: {column: np.concatenate([part[column] for part in parts]) for column in parts[0]}
        for name, parts in found.items()
        if parts
    }
    joined["scalars"] = _scalars(run)
    return joined


def _launch_tables(launch: LaunchData, ledger: LaunchLedger) -> dict[str, Columns]:
    segments = _segments(launch, ledger)
    waits = segments["class"] == "peer_wait"
    found: dict[str, Columns] = {
        "ledger": _ledger(ledger),
        "segments": segments,
        "steps": _steps(launch, ledger),
        "waits": {name: column[waits] for name, column in segments.items() if name != "class"},
        "spans": _spans(launch),
        "collectives": _collectives(launch),
    }
    for what, columns in launch.samples.items():
        found[f"{what}_samples"] = {**columns, "time": (columns["time"] - launch.begin) / 1e9}
    return found


def _ledger(ledger: LaunchLedger) -> Columns:
    rows = [(row.rank, kind.name.lower(), ns / 1e9) for row in ledger.rows for kind, ns in row.totals().items()]
    return {
        "rank": np.array([row[0] for row in rows], np.int32),
        "class": _texts(row[1] for row in rows),
        "seconds": np.array([row[2] for row in rows], np.float64),
    }


def _segments(launch: LaunchData, ledger: LaunchLedger) -> Columns:
    parts = [(row.rank, row.segments) for row in ledger.rows]
    join = {
        name: np.concatenate([getattr(part, name) for _, part in parts] or [np.zeros(0, np.int64)])
        for name in ("begin", "end", "kind", "step", "culprit", "cause")
    }
    return {
        "rank": np.concatenate(
            [np.full(len(part.begin), rank, np.int32) for rank, part in parts] or [np.zeros(0, np.int32)]
        ),
        "begin": (join["begin"] - launch.begin) / 1e9,
        "seconds": (join["end"] - join["begin"]) / 1e9,
        "class": _CLASSES[join["kind"]],
        "step": join["step"],
        "culprit": join["culprit"],
        "cause": np.where(join["cause"] >= 0, _CLASSES[join["cause"]], ""),
    }


def _steps(launch: LaunchData, ledger: LaunchLedger) -> Columns:
    steps = ledger.steps
    return {
        "rank": steps.rank,
        "step": steps.step,
        "end": (steps.end - launch.begin) / 1e9,
        "seconds": steps.lasted / 1e9,
        "cpu": steps.ran / 1e9,
        "core_wait": steps.delayed / 1e9,
        **{kind.name.lower(): steps.spent[:, kind] / 1e9 for kind in Class},
    }


def _spans(launch: LaunchData) -> Columns:
    found: list[tuple[int, int, str, NDArray[Any], NDArray[Any]]] = []
    for process in launch.processes.values():
        for name in process.names:
            begin, end = spans_of(process, name)
            if len(begin):
                found.append((process.rank, process.generation, name, begin, end))
    empty = [np.zeros(0, np.int64)]
    begin = np.concatenate([each[3] for each in found] or empty)
    end = np.concatenate([each[4] for each in found] or empty)
    return {
        "rank": np.concatenate([np.full(len(each[3]), each[0], np.int32) for each in found] or empty),
        "generation": np.concatenate([np.full(len(each[3]), each[1], np.int32) for each in found] or empty),
        "name": _texts(each[2] for each in found for _ in range(len(each[3]))),
        "begin": (begin - launch.begin) / 1e9,
        "seconds": (end - begin) / 1e9,
    }


def _collectives(launch: LaunchData) -> Columns:
    ranks: list[NDArray[Any]] = [np.zeros(0, np.int32)]
    parts: dict[str, list[NDArray[Any]]] = {name: [np.zeros(0, np.int64)] for name in ("time", "argument", "step")}
    ops: list[str] = []
    groups: list[str] = []
    for key, process in launch.processes.items():
        columns = process.columns
        chosen = np.isin(columns["name"], process.ids(COLLECTIVES | ONE_WAY)) & (columns["kind"] == SpanKind.POINT)
        ranks.append(np.full(int(chosen.sum()), process.rank, np.int32))
        for name, part in parts.items():
            part.append(columns[name][chosen].astype(np.int64))
        ops += [process.names[number] for number in columns["name"][chosen].tolist()]
        known = launch.groups.get(key, {})
        numbers = (columns["argument"][chosen] >> 56).astype(int).tolist()
        groups += [known[number].name if number in known else "" for number in numbers]
    argument = np.concatenate(parts["argument"])
    return {
        "rank": np.concatenate(ranks),
        "op": _texts(ops),
        "group": _texts(groups),
        "number": argument >> 32 & 0xFFFFFF,
        "bytes": argument & 0xFFFFFFFF,
        "issued": (np.concatenate(parts["time"]) - launch.begin) / 1e9,
        "step": np.concatenate(parts["step"]),
    }


def _scalars(run: RunData) -> Columns:
    rows = [(step, at, name, value) for step, at, values in run.scalars for name, value in values.items()]
    return {
        "step": np.array([row[0] for row in rows], np.int64),
        "at": np.array([row[1] for row in rows], np.float64),
        "name": _texts(row[2] for row in rows),
        "value": np.array([row[3] for row in rows], np.float64),
    }


def _texts(values: Any) -> NDArray[Any]:
    found = list(values)
    column = np.empty(len(found), object)
    column[:] = found
    return column
