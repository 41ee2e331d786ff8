"""A step as one graph: predicted, rewritten and run; compared with eager FSDP2, eager losses and published steps.

    python bench/graph.py [--quick] [--only ROW[:CONTENDER],...] [--repeat N] [--json PATH]

CPU ranks only: nothing here runs on a GPU. Rows in CPU seconds and bytes do not depend on what else the machine does.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from functools import cache, partial
from pathlib import Path
from typing import Any

from harness import Contender, Failed, Goal, Options, Row, run_benches

SCRIPTS = Path(__file__).resolve().parent / "scripts"
MEASURED = Path(__file__).resolve().parents[1] / "tests" / "cost" / "data" / "vtrain_train.csv"
TIMEOUT_S = 1200


def run_ranks(command: list[str], ranks: int) -> str:
    """Start a script once per rank, with the rank as its last argument; return what rank 0 printed."""
    started = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    try:
        done = [each.communicate(timeout=TIMEOUT_S) for each in started]
    except subprocess.TimeoutExpired:
        raise Failed(f"no end after {TIMEOUT_S} s") from None
    finally:
        for each in started:
            each.kill()
            each.wait()
    if any(each.returncode for each in started):
        raise Failed(done[0][1].strip().splitlines()[-1] if done[0][1].strip() else "a rank failed")
    return done[0][0]


def step_ms(kind: str, shape: str, ranks: int, steps: int, figure: int = 0) -> float:
    """Milliseconds of a step on rank 0: the median on the clock, or with `figure` 1 the least CPU time."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, str(SCRIPTS / "graph_ranks.py"), kind, shape, f"file://{directory}/store"]
        return float(json.loads(run_ranks([*command, str(ranks), str(steps)], ranks).splitlines()[-1])[figure])


def probe(*words: str) -> float:
    """One figure of scripts/graph_probe.py, in a process of its own."""
    try:
        done = subprocess.run(
            [sys.executable, str(SCRIPTS / "graph_probe.py"), *words], capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"no end after {TIMEOUT_S} s") from None
    if done.returncode:
        raise Failed((done.stderr.strip().splitlines() or ["the probe failed"])[-1])
    return float(done.stdout.split()[-1])


@cache
def real_runs(quick: bool) -> list[dict[str, Any]]:
    """Records of compiled steps of 1, 2 and 4 ranks, each predicted with a chip that was measured just before."""
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        for ranks in (1, 2) if quick else (1, 2, 4):
            chip = f"{directory}/cpu{ranks}.toml"
            words = ["-m", "argosy", "chip", "measure", chip, "--ranks", str(ranks), "--budget-s", "30"]
            subprocess.run([sys.executable, *words], check=True, capture_output=True, timeout=TIMEOUT_S)
            script, store = str(SCRIPTS / "graph_real.py"), f"file://{directory}/store{ranks}"
            command = [sys.executable, script, chip, store, str(ranks), str(3 if quick else 10)]
            found += [json.loads(line) for line in run_ranks(command, ranks).splitlines() if line.startswith("{")]
    return found


def real_figure(which: str, quick: bool) -> float:
    """One figure of all real runs, in percent."""
    runs = [(each["predicted"], each["measured"]) for each in real_runs(quick)]
    times = [abs(wanted["step_s"] / got["step_s"] - 1) * 100 for wanted, got in runs]
    peaks = [(wanted["peak_bytes"] / got["peak_bytes"] - 1) * 100 for wanted, got in runs]
    inside = [wanted["low_s"] <= got["step_s"] <= wanted["high_s"] for wanted, got in runs]
    return {
        "time median": statistics.median(times),
        "time worst": max(times),
        "memory median": statistics.median(map(abs, peaks)),
        "memory under": max(0.0, -min(peaks)),
        "interval": 100 * sum(inside) / len(inside),
    }[which]


def real_rows(options: Options) -> list[Row]:
    wanted = {"time median": 10, "time worst": 25, "memory median": 4, "memory under": 3, "interval": 90}
    return [
        Row(
            key=f"real-{which.replace(' ', '-')}",
            title=f"predicted against real steps of 1-4 CPU ranks: {which}",
            base="argosy",
            unit="%",
            contenders=[
                Contender(name="argosy", sample=partial(real_figure, which, bool(options.quick)), repeat_max=1)
            ],
            goals=[Goal(of="argosy", at_most=goal)],
        )
        for which, goal in wanted.items()
    ]


def vtrain_error(which: str) -> float:
    """The mean error in percent on rows of model sizes that were left out of the fit."""
    from argosy.cost import leave_sizes_out, read_rows, score

    rows, seconds = read_rows(str(MEASURED))
    found = {each.set: each for each in score(rows, seconds, leave_sizes_out(rows, seconds))}
    return (found[which.removesuffix(" regret")].regret if "regret" in which else found[which].error) * 100


def folded_s() -> float:
    """CPU seconds to simulate a step of 126 layers on 16,384 ranks, one of them slow."""
    from argosy.cost import Collective, Op, Recipe, Trace, load_chip
    from argosy.sim import sim_pipeline

    ops: list[Op] = []
    for phase in ("forward", "backward"):
        for _ in range(8):  # 126 layers over 16 stages.
            for call in range(40):
                last = (len(ops) - 1,) if ops else ()
                kind = {0: "all_gather", 20: "all_reduce", 39: "reduce_scatter"}.get(call)
                what = Collective(kind, "tp" if call == 20 else "fsdp", 5e8) if kind else None
                shape = "collective" if kind else "matmul"
                ops.append(Op(kind or "mm", shape, phase, 1e11, 1e8, "bf16", last, what))
    recipe = Recipe(tp=8, fsdp=128, pp=16, accumulate=16)
    began = time.process_time()
    sim_pipeline(Trace(tuple(ops), {}), recipe, load_chip("h100"), {77: 1.1})
    return time.process_time() - began


def step_rows(options: Options) -> list[Row]:
    steps = 10 if options.quick else 40
    kinds = ("fsdp2", "fsdp2 compiled", "argosy graph", "argosy")
    wanted = (
        ("small", "many small parameters", 2, 2.0),
        ("small4", "many small parameters", 4, 2.0),
        ("gpt14m", "14M", 2, 1.1),
    )
    found: list[Row] = []
    for key, shape, ranks, times in wanted:
        for figure, of in ((0, "a step"), (1, "CPU time of a step")):
            found.append(
                Row(
                    key=f"{key}-cpu" if figure else key,
                    title=f"{of} with FSDP on {ranks} Gloo ranks, {shape}",
                    base="fsdp2",
                    unit="ms",
                    contenders=[
                        Contender(name=kind, sample=partial(step_ms, kind, shape, ranks, steps, figure))
                        for kind in kinds
                    ],
                    goals=[Goal(of="argosy", times_of="fsdp2", times=times)],
                )
            )
    return found


def rows(options: Options) -> list[Row]:
    size = ("1024", "256", "8192") if options.quick else ("8192", "1024", "32768")
    found = step_rows(options) + real_rows(options)
    for which, goal in (("multi", 8.0), ("single", 6.0), ("multi regret", 1.5), ("single regret", 1.5)):
        found.append(
            Row(
                key=f"vtrain-{which.replace(' ', '-')}",
                title=f"vTrain's A100 steps of sizes left out of the fit, {which}",
                base="argosy",
                unit="%",
                contenders=[Contender(name="argosy", sample=partial(vtrain_error, which), repeat_max=1)],
                goals=[Goal(of="argosy", at_most=goal)],
            )
        )
    found.append(
        Row(
            key="loss",
            title=f"linear + cross-entropy {' x '.join(size)}: peak beyond inputs and gradients",
            base="eager",
            unit="MB",
            contenders=[
                Contender(name=kind, sample=partial(probe, "loss", kind, *size), repeat_max=1)
                for kind in ("eager", "argosy")
            ],
            goals=[Goal(of="argosy", times_of="eager", times=10.0)],
        )
    )
    found.append(
        Row(
            key="folded",
            title="one step of 16,384 ranks (tp=8 fsdp=128 pp=16), folded, CPU seconds",
            base="argosy",
            contenders=[Contender(name="argosy", sample=folded_s)],
            goals=[Goal(of="argosy", at_most=1.0)],
        )
    )
    for key, unit, goal in (("capture", "s", 60.0), ("capture-memory", "MB", 2048.0)):
        found.append(
            Row(
                key=key,
                title=f"capture of a 32-layer GPT on 1,024 ranks, {'CPU seconds' if unit == 's' else 'peak memory'}",
                base="argosy",
                unit=unit,
                contenders=[Contender(name="argosy", sample=partial(probe, key), repeat_max=1)],
                goals=[Goal(of="argosy", at_most=goal)],
            )
        )
    return found


if __name__ == "__main__":
    sys.exit(run_benches("A step as one graph, beside eager FSDP2.", rows))
