"""What recording costs, and how fast traces are read.

    python bench/observe.py [--quick] [--only ROW[:CONTENDER],...] [--repeat N] [--json PATH]

The cost of the hooks is measured inside one run of four ranks, whose steps of 50 ms are recorded and not recorded in
turns: the difference of the medians of the training thread's CPU time. The goal is 0.5% of a step.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from contenders import SCRIPTS
from harness import Contender, Failed, Goal, Options, Row, run_benches
from peers import Missing

SPANS, SCALARS = 20, 50
ROUNDS = 2000
EVENTS, QUICK_EVENTS = 400_000, 40_000
DEADLINE_S = 300.0


def hook_cost(kind: str, steps: int) -> float:
    """Seconds of CPU time per step and rank that recording takes."""
    command = [sys.executable, str(SCRIPTS / "hook_cost.py"), kind, str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["silent"])[-1]
        raise Missing("traceml-ai") if "No module named 'traceml" in said else Failed(said)
    return max(0.0, float(done.stdout))


def per_call(body: Callable[[], None]) -> float:
    """Seconds of CPU time of one call."""
    began = time.thread_time()
    for _ in range(ROUNDS):
        body()
    return (time.thread_time() - began) / ROUNDS


def argosy_span() -> float:
    from argosy.observe import Ring, record_spans, span

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        record_spans(Ring.create(Path(folder) / "ring"))
        once = span("work")

        def body() -> None:
            with once:
                pass

        return per_call(body)


def torch_span() -> float:
    from torch.profiler import record_function

    def body() -> None:
        with record_function("work"):
            pass

    return per_call(body)


def opentelemetry_span() -> float:
    try:
        from opentelemetry.sdk.trace import TracerProvider
    except ImportError:
        raise Missing("opentelemetry-sdk") from None
    tracer = TracerProvider().get_tracer("bench")

    def body() -> None:
        with tracer.start_as_current_span("work"):
            pass

    return per_call(body)


def argosy_step() -> float:
    from argosy.observe import Journal, Ring, record_spans, span

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        record_spans(Ring.create(Path(folder) / "ring"))
        journal, once = Journal(Path(folder) / "journal"), span("work")
        row = json.dumps({f"scalar{number}": 0.5 for number in range(SCALARS)}).encode()

        def body() -> None:
            for _ in range(SPANS):
                with once:
                    pass
            journal.append(row)

        return per_call(body)


def tensorboard_step() -> float:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise Missing("tensorboard") from None
    with tempfile.TemporaryDirectory() as folder:
        writer = SummaryWriter(folder)

        def body() -> None:
            for number in range(SCALARS):
                writer.add_scalar(f"scalar{number}", 0.5, 1)

        try:
            return per_call(body)
        finally:
            writer.close()


class TraceFile:
    """A trace as Kineto writes it, made once."""

    def __init__(self, events: int) -> None:
        self.events, self._folder = events, tempfile.TemporaryDirectory()

    @property
    def path(self) -> Path:
        path = Path(self._folder.name) / "trace.json"
        if not path.exists():
            template = (
                '  {{\n    "ph": "X", "cat": "kernel", "name": "{name}", "pid": 0, "tid": {stream},\n'
                '    "ts": {begin}.125, "dur": 7.5,\n    "args": {{\n      "External id": {number},"device": 0, '
                '"stream": {stream}, "correlation": {number}, "grid": [64, 1, 1], "block": [256, 1, 1]\n    }}\n  }}'
            )
            names = [f"kernel_{number}" for number in range(40)] + ["ncclDevKernel_AllReduce"]
            with path.open("w") as file:
                file.write('{\n  "schemaVersion": 1,\n  "traceEvents": [\n')
                for number in range(self.events):
                    text = template.format(
                        name=names[number % 41], stream=7 + number % 2, begin=number * 9, number=number
                    )
                    file.write(text + (",\n" if number + 1 < self.events else "\n"))
                file.write("  ]\n}\n")
        return path


def argosy_trace(file: TraceFile) -> float:
    from argosy.insight.kineto import read_trace
    from argosy.insight.trace_analysis import summarise

    path, began = file.path, time.perf_counter()
    summarise(read_trace(path))
    return time.perf_counter() - began


def json_trace(file: TraceFile) -> float:
    path, began = file.path, time.perf_counter()
    json.loads(path.read_text())
    return time.perf_counter() - began


def hta_trace(file: TraceFile) -> float:
    try:
        from hta.trace_analysis import TraceAnalysis
    except ImportError:
        raise Missing("HolisticTraceAnalysis") from None
    path, began = file.path, time.perf_counter()
    analysis = TraceAnalysis(trace_files={0: str(path)})
    analysis.get_temporal_breakdown(visualize=False)
    analysis.get_comm_comp_overlap(visualize=False)
    return time.perf_counter() - began


def rows(options: Options) -> list[Row]:
    file = TraceFile(QUICK_EVENTS if options.quick else EVENTS)
    return [
        Row(
            key="hooks",
            title="CPU time of all hooks in a DDP step of 50 ms on 4 ranks",
            contenders=[
                Contender(name=name, sample=partial(hook_cost, name, 200 if options.quick else 800))
                for name in ("argosy", "traceml")
            ],
            base="argosy",
            goals=[Goal(of="argosy", at_most=0.005 * 0.05)],
        ),
        Row(
            key="span",
            title="one span",
            contenders=[
                Contender(name="record_function", sample=torch_span),
                Contender(name="argosy", sample=argosy_span),
                Contender(name="opentelemetry", sample=opentelemetry_span),
            ],
            base="record_function",
            goals=[Goal(of="argosy", times_of="record_function", times=40)],
        ),
        Row(
            key="step",
            title=f"{SPANS} spans and {SCALARS} scalars (TensorBoard: the scalars alone)",
            contenders=[
                Contender(name="tensorboard", sample=tensorboard_step),
                Contender(name="argosy", sample=argosy_step),
            ],
            base="tensorboard",
            goals=[Goal(of="argosy", times_of="tensorboard", times=100)],
        ),
        Row(
            key="trace",
            title=f"load a trace of {file.events:,} events, breakdown and overlap (json: parsing alone)",
            contenders=[
                Contender(name="json", sample=partial(json_trace, file)),
                Contender(name="argosy", sample=partial(argosy_trace, file)),
                Contender(name="hta", sample=partial(hta_trace, file), repeat_max=1),
            ],
            base="json",
            goals=[Goal(of="argosy", times_of="hta", times=10)],
        ),
    ]


if __name__ == "__main__":
    sys.exit(run_benches("Recording beside torch.profiler and others; traces beside HTA.", rows))
