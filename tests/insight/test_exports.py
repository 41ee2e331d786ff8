"""What is exported carries the numbers of `argosy sql`, in formats that others read."""

import csv
import http.server
import json
import threading
import urllib.request
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pyarrow.parquet
import pytest
from recordings import Recording, write_run

from argosy.core import ConfigError
from argosy.insight import MetricsEndpoint, OpenedRun, export_run, send_otlp
from argosy.insight.live_trace import merge_traces
from argosy.observe import Journal


@pytest.fixture
def run(tmp_path: Path) -> OpenedRun:
    ranks = [Recording(rank).span("data", 0, 5).span("forward", 5, 30).step(30) for rank in range(2)]
    directory = write_run(tmp_path / "run", ranks, 100)
    with Journal(directory / "metrics" / "log") as log:
        log.append(msgspec.msgpack.encode({"type": "row", "step": 1, "at": 7.0, "values": {"loss": 0.5}}))
    return OpenedRun(directory)


def test_tables_are_the_same_in_every_format(run: OpenedRun, tmp_path: Path):
    for form in ("csv", "json", "parquet"):
        export_run(run, form, tmp_path)
    told = [tuple(map(str, row)) for row in run.sql("SELECT * FROM ledger").rows]
    with open(tmp_path / "ledger.csv") as file:
        assert [tuple(row) for row in csv.reader(file)][1:] == told
    lines = (tmp_path / "ledger.json").read_text().splitlines()
    assert [tuple(map(str, json.loads(line).values())) for line in lines] == told
    table: Any = pyarrow.parquet.read_table(tmp_path / "ledger.parquet")
    assert [tuple(map(str, row.values())) for row in table.to_pylist()] == told


def test_perfettos_file_holds_every_span_of_every_rank(run: OpenedRun, tmp_path: Path):
    (path,) = export_run(run, "perfetto", tmp_path)
    events = json.loads(path.read_text())["traceEvents"]
    found = {
        (event["pid"], event["name"], event["dur"]) for event in events if event.get("tid") == 0 and "dur" in event
    }
    assert found == {(rank, name, dur) for rank in (0, 1) for name, dur in (("data", 5000.0), ("forward", 25000.0))}


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes what it is sent."""

    taken: ClassVar[list[tuple[str, Any]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.taken.append((self.path, json.loads(body)))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_collector_is_sent_spans_and_scalars(run: OpenedRun):
    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert send_otlp(run, f"http://127.0.0.1:{server.server_address[1]}") == 2
        server.shutdown()
    sent = dict(Collector.taken)
    spans = sent["/v1/traces"]["resourceSpans"][0]["scopeSpans"][0]["spans"]
    assert sorted(span["name"] for span in spans) == ["data", "data", "forward", "forward"]
    assert {int(span["endTimeUnixNano"]) - int(span["startTimeUnixNano"]) for span in spans} == {5_000_000, 25_000_000}
    (metric,) = sent["/v1/metrics"]["resourceMetrics"][0]["scopeMetrics"][0]["metrics"]
    assert (metric["name"], metric["gauge"]["dataPoints"][0]["asDouble"]) == ("loss", 0.5)
    with pytest.raises(ConfigError, match="the collector"):
        send_otlp(run, "http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="not the address"):
        send_otlp(run, "ftp://x")


def test_prometheus_reads_the_endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ARGOSY_RUNTIME_DIR", str(tmp_path / "r"))
    with MetricsEndpoint("127.0.0.1", 0) as endpoint:
        threading.Thread(target=endpoint.serve_forever, daemon=True).start()
        with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.server_address[1]}/metrics") as answer:
            text = answer.read().decode()
        endpoint.shutdown()
    assert "# TYPE argosy_rank_steps gauge" in text


def test_traces_of_ranks_lie_apart_and_on_one_clock(tmp_path: Path):
    for rank, base in ((0, 1_000_000), (3, 3_000_000)):
        events = [
            {"ph": "M", "name": "process_name", "pid": 77, "args": {"name": "python"}},
            {"ph": "X", "name": "step", "pid": 77, "tid": 1, "ts": 10.0, "dur": 5.0},
            {"ph": "s", "name": "flow", "pid": 77, "tid": 1, "ts": 10.0, "id": 4},
        ]
        (tmp_path / f"{rank}.json").write_text(json.dumps({"baseTimeNanoseconds": base, "traceEvents": events}))
    merge_traces({0: tmp_path / "0.json", 3: tmp_path / "3.json"}, tmp_path / "all.json")
    events = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert sorted(names.values()) == ["rank 0: 77", "rank 3: 77"]
    assert sorted(event["ts"] for event in events if event["ph"] == "X") == [10.0, 2010.0]
    assert len({event["id"] for event in events if event["ph"] == "s"}) == 2
    (tmp_path / "3.json").write_text("{")
    with pytest.raises(ConfigError, match="not a trace"):
        merge_traces({3: tmp_path / "3.json"}, tmp_path / "all.json")
