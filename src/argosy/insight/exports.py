"""Give a run's records to other programs: tables as CSV, JSON or Parquet, spans for Perfetto, both over OTLP.

E1  What was written carries the numbers of `argosy sql`.
"""

import csv
import hashlib
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from argosy.core import ConfigError
from argosy.insight.opened import OpenedRun
from argosy.insight.sql import parquet_writer
from argosy.observe import Columns

FORMATS = ("csv", "json", "parquet", "perfetto", "otlp")
BATCH = 5000
"""Spans or points in one OTLP request."""
POST_S = 10.0


def export_run(run: OpenedRun, form: str, output: Path) -> list[Path]:
    """Write files into a directory, which is made; returns them.

    Raises:
        ConfigError: what the format needs is missing.
        OSError: they cannot be written.
    """
    output.mkdir(parents=True, exist_ok=True)
    if form == "perfetto":
        return [_write(output / "spans.perfetto.json", b'{"traceEvents": [\n', perfetto_events(run), b"\n]}\n")]
    if form == "otlp":
        found = [(f"{kind}.otlp.jsonl", request) for kind, request in otlp_requests(run)]
        names = sorted({name for name, _ in found})
        return [_lines(output / name, [request for each, request in found if each == name]) for name in names]
    write_parquet = parquet_writer() if form == "parquet" else None
    paths: list[Path] = []
    for name, columns in run.tables.items():
        path = output / f"{name}.{form}"
        if write_parquet is not None:
            write_parquet(columns, path)
        elif form == "json":
            _lines(path, (dict(zip(columns, row, strict=True)) for row in _rows(columns)))
        else:
            with open(path, "w", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(columns)
                writer.writerows(_rows(columns))
        paths.append(path)
    return paths


def _rows(columns: Columns) -> Iterator[tuple[Any, ...]]:
    return zip(*(column.tolist() for column in columns.values()), strict=True)


def _lines(path: Path, items: Any) -> Path:
    with open(path, "wb") as file:
        for item in items:
            file.write(msgspec.json.encode(item) + b"\n")
    return path


def _write(path: Path, head: bytes, items: Iterator[dict[str, Any]], tail: bytes) -> Path:
    with open(path, "wb") as file:
        for number, item in enumerate(items):
            file.write((b",\n" if number else head) + msgspec.json.encode(item))
        file.write(tail)
    return path


def perfetto_events(run: OpenedRun) -> Iterator[dict[str, Any]]:
    """Spans, and what each rank's time was spent on, in the JSON format that Perfetto opens."""
    for rank in range(run.data.record.size):
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        for tid, name in ((0, "spans"), (1, "time by class")):
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": name}}
    for table, name, tid in (("spans", "name", 0), ("segments", "class", 1)):
        columns = run.tables.get(table, {})
        for launch, rank, begin, seconds, what in _rows(
            {each: columns[each] for each in ("launch", "rank", "begin", "seconds", name)} if columns else {}
        ):
            at = (run.begins[launch] - run.begins[min(run.begins)]) / 1e3 + begin * 1e6
            yield {"ph": "X", "name": what, "pid": rank, "tid": tid, "ts": at, "dur": seconds * 1e6}


def otlp_requests(run: OpenedRun) -> Iterator[tuple[str, dict[str, Any]]]:
    """Bodies for `/v1/traces` and `/v1/metrics`, in OTLP's JSON encoding; each names its resource."""
    trace = hashlib.blake2s(run.name.encode() + str(run.directory).encode(), digest_size=16).hexdigest()
    resource = {"attributes": [_text("service.name", "argosy"), _text("argosy.run", run.name)]}
    scope = {"name": "argosy"}
    spans: list[dict[str, Any]] = []
    table = run.tables.get("spans", {})
    for number, (launch, rank, name, begin, seconds) in enumerate(
        _rows({each: table[each] for each in ("launch", "rank", "name", "begin", "seconds")} if table else {})
    ):
        at = run.begins[launch] + int(begin * 1e9)
        spans.append(
            {
                "traceId": trace,
                "spanId": f"{number + 1:016x}",
                "name": name,
                "kind": 1,
                "startTimeUnixNano": str(at),
                "endTimeUnixNano": str(at + int(seconds * 1e9)),
                "attributes": [{"key": "argosy.rank", "value": {"intValue": str(rank)}}],
            }
        )
    for at in range(0, len(spans), BATCH):
        part = {"scope": scope, "spans": spans[at : at + BATCH]}
        yield "traces", {"resourceSpans": [{"resource": resource, "scopeSpans": [part]}]}
    for name in run.scalar_names():
        points = [
            {
                "timeUnixNano": str(int(at * 1e9)),
                "asDouble": values[name],
                "attributes": [{"key": "argosy.step", "value": {"intValue": str(step)}}],
            }
            for step, at, values in run.data.scalars
            if name in values
        ]
        for at in range(0, len(points), BATCH):
            metric = {"name": name, "gauge": {"dataPoints": points[at : at + BATCH]}}
            part = {"scope": scope, "metrics": [metric]}
            yield "metrics", {"resourceMetrics": [{"resource": resource, "scopeMetrics": [part]}]}


def _text(key: str, value: str) -> dict[str, Any]:
    return {"key": key, "value": {"stringValue": value}}


def send_otlp(run: OpenedRun, endpoint: str) -> int:
    """Send everything to a collector (`http://localhost:4318`); returns the number of requests.

    Raises:
        ConfigError: it cannot be reached, or refuses.
    """
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"not the address of a collector: {endpoint}", hint="http://localhost:4318")
    sent = 0
    for kind, body in otlp_requests(run):
        url = f"{endpoint.rstrip('/')}/v1/{kind}"
        request = urllib.request.Request(url, msgspec.json.encode(body), {"Content-Type": "application/json"})
        try:
            urllib.request.urlopen(request, timeout=POST_S).close()
        except (OSError, urllib.error.URLError) as error:
            raise ConfigError(f"the collector does not take it: {url}: {error}") from None
        sent += 1
    return sent
