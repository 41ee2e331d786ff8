"""Traces of torch.profiler that Argosy did not make: the numbers are right, a cut-off file opens."""

import gzip
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import run_script

from argosy.core import ConfigError
from argosy.insight.kineto import read_trace
from argosy.insight.trace_analysis import judge_trace, summarise, union
from argosy.insight.trace_report import report_trace, trace_lines


def kernel(name: str, begin: float, lasted: float, stream: int = 7, cat: str = "kernel") -> dict[str, Any]:
    args = {"device": 0, "stream": stream, "queued": 0}
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": stream, "ts": begin, "dur": lasted, "args": args}


DEVICE = [
    {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "ts": 0, "args": {"name": "python"}},
    kernel("gemm", 0, 40),
    kernel("gemm", 60, 40),
    kernel("ncclDevKernel_AllReduce_Sum", 30, 60, stream=9),
    kernel("Memcpy HtoD", 150, 50, cat="gpu_memcpy"),
    {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 0, "dur": 10, "args": {}},
    {"ph": "X", "cat": "cpu_op", "name": "aten::addmm", "pid": 1, "tid": 1, "ts": -5, "dur": 20, "args": {}},
    {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#3", "pid": 1, "tid": 1, "ts": -5, "dur": 205},
]


@pytest.mark.parametrize("layout", ["kineto", "compact", "gz", "list", "odd"])
def test_a_device_trace_is_measured(tmp_path: Path, layout: str):
    path = tmp_path / ("trace.json.gz" if layout == "gz" else "trace.json")
    events = [*DEVICE, {"ph": "X", "cat": ["odd"], "name": 3, "ts": "x"}] if layout == "odd" else DEVICE
    whole: Any = events if layout == "list" else {"schemaVersion": 1, "traceEvents": events, "traceName": "a]b"}
    text = json.dumps(whole, indent=2 if layout == "kineto" else None)
    path.write_bytes(gzip.compress(text.encode()) if layout == "gz" else text.encode())
    summary = summarise(read_trace(path))
    assert summary.devices
    assert (summary.total_us, summary.busy_us, summary.idle_us) == (200, 150, 50)
    assert (summary.compute_us, summary.communication_us, summary.overlap_us) == (80, 60, 40)
    assert (summary.copy_us, summary.steps) == (50, [205])
    assert {(cost.name, cost.count, cost.total_us) for cost in summary.kernels} == {
        ("gemm", 2, 80),
        ("ncclDevKernel_AllReduce_Sum", 1, 60),
        ("Memcpy HtoD", 1, 50),
    }
    assert {(cost.name, cost.total_us) for cost in summary.operators} == {("aten::addmm", 10), ("aten::mm", 10)}
    assert {verdict.kind for verdict in judge_trace(summary)} == {"host_bound", "copy_bound"}


def test_a_large_trace_is_read_in_parts_and_a_cut_off_one_as_far_as_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("argosy.insight.kineto.PART_BYTES", 5000)
    events = [kernel(f"k{number % 7}", number * 10.0, 5.0) for number in range(1000)]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}, indent=2).replace("\n    ", "\n  ").replace("\n  }", "\n  }"))
    trace = read_trace(path)
    assert trace.begin.tolist() == [number * 10.0 for number in range(1000)]
    assert trace.damage == []
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) * 2 // 3])
    cut = read_trace(path)
    assert 600 < len(cut.begin) < 700
    assert len(cut.damage) == 1


def test_what_is_no_trace_is_refused(tmp_path: Path):
    for content in ("", "{}", "hello", '{"traceEvents": []}'):
        path = tmp_path / "trace.json"
        path.write_text(content)
        with pytest.raises(ConfigError, match="not a trace"):
            read_trace(path)


def test_union_covers_the_same_time():
    chance = random.Random(1)
    for _ in range(100):
        begin = np.array([chance.randrange(100) for _ in range(20)], float)
        end = begin + np.array([chance.randrange(1, 10) for _ in range(20)], float)
        covered = {moment for a, b in zip(begin, end, strict=True) for moment in range(int(a), int(b))}
        starts, ends = union(begin, end)
        assert (starts[1:] > ends[:-1]).all()
        assert {moment for a, b in zip(starts, ends, strict=True) for moment in range(int(a), int(b))} == covered


def test_a_trace_of_this_torch_is_read(tmp_path: Path):
    script = """
import os, sys, torch
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # The profiler says what this machine does not have.
from torch.profiler import profile, ProfilerActivity
model = torch.nn.Linear(8, 8)
with profile(activities=[ProfilerActivity.CPU]) as profiler:
    for batch in torch.utils.data.DataLoader(torch.randn(40, 8), batch_size=4):
        model(batch).sum().backward()
        profiler.step()
profiler.export_chrome_trace(sys.argv[1])
"""
    path = tmp_path / "trace.json"
    run_script(script, str(path))
    trace = read_trace(path)
    whole = json.loads(path.read_text())["traceEvents"]
    assert len(trace.begin) == sum(event.get("ph") == "X" for event in whole)
    page, summary, verdicts = report_trace(path)
    assert "aten::addmm" in page.read_text()
    assert trace_lines(summary, verdicts)[0].startswith("CPU operators")
