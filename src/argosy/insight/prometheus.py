"""What the agent knows of living runs, for Prometheus: one line per run and quantile over its ranks, never per rank."""

import http.server
import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from argosy.fabric import runtime_dir, shared_memory_path
from argosy.observe import Page
from argosy.supervise import RunInfo, list_runs

ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
QUANTILES = (0.0, 0.5, 0.9, 1.0)
GAUGES = {
    "argosy_run_ranks": "Ranks of a living run.",
    "argosy_run_restarts": "Processes of ranks that took the place of another.",
    "argosy_run_started_seconds": "When the run began, since the epoch.",
}
SUMMARIES = {
    "argosy_rank_steps": "Steps done, over ranks.",
    "argosy_rank_seconds_since_step": "Time since the last step, over ranks.",
    "argosy_rank_resident_bytes": "Resident memory, over ranks.",
    "argosy_rank_cpu_seconds": "CPU time since the start of the process, over ranks.",
}


class Sample(msgspec.Struct, frozen=True):
    """One number."""

    name: str
    labels: dict[str, str]
    value: float


def metric_samples() -> list[Sample]:
    """Everything that is known of living runs."""
    found: list[Sample] = []
    for run in list_runs().runs:
        values = (run.size, sum(rank.generation for rank in run.ranks), run.started_at)
        found += [Sample(name, {"run": run.name}, value) for name, value in zip(GAUGES, values, strict=True)]
        for name, column in zip(SUMMARIES, _columns(run), strict=True):
            for quantile in QUANTILES if column else ():
                value = sorted(column)[round(quantile * (len(column) - 1))]
                found.append(Sample(name, {"run": run.name, "quantile": f"{quantile:g}"}, value))
    return found


def metrics_text() -> str:
    """The same in Prometheus' text format."""
    lines = [f"# HELP {name} {text}\n# TYPE {name} gauge" for name, text in {**GAUGES, **SUMMARIES}.items()]
    for sample in metric_samples():
        labels = ",".join(f'{name}="{text.translate(ESCAPES)}"' for name, text in sample.labels.items())
        lines.append(f"{sample.name}{{{labels}}} {sample.value:.15g}")
    return "\n".join(lines) + "\n"


def _columns(run: RunInfo) -> Sequence[list[float]]:
    memory, ticks, size = (
        shared_memory_path(runtime_dir()) / run.run,
        os.sysconf("SC_CLK_TCK"),
        os.sysconf("SC_PAGE_SIZE"),
    )
    steps, since, resident, cpu = (list[float]() for _ in range(4))
    for rank in run.ranks:
        steps.append(rank.steps)
        try:
            page = Page.open(memory / f"{rank.index}.{rank.generation}.page")
            progress = page.read()
            page.detach()
            if progress is not None and progress.step_at:
                since.append(max(0.0, time.monotonic() - progress.step_at / 1e9))
            fields = Path(f"/proc/{rank.pid}/stat").read_text().rpartition(")")[2].split()
        except (OSError, ValueError):
            continue  # It is on another host, or has just ended.
        cpu.append((int(fields[11]) + int(fields[12])) / ticks)
        resident.append(int(fields[21]) * size)
    return steps, since, resident, cpu


class MetricsEndpoint(http.server.ThreadingHTTPServer):
    """Answers `GET /metrics`; each answer asks the agent."""

    daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        super().__init__((host, port), _Handler)


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path != "/metrics":
            return self.send_error(404)
        body = metrics_text().encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        return None

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing of each request."""
