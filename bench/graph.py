"""A step as one graph, compared with eager FSDP2 on Gloo ranks.

    python bench/graph.py [--quick] [--only ROW[:CONTENDER],...] [--repeat N] [--json PATH]

CPU ranks only: nothing here runs on a GPU.
"""

import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from harness import Contender, Failed, Goal, Options, Row, run_benches

SCRIPT = Path(__file__).resolve().parent / "scripts" / "graph_ranks.py"
TIMEOUT_S = 600


def step_ms(kind: str, shape: str, ranks: int, steps: int) -> float:
    """The median milliseconds of a step on rank 0."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, str(SCRIPT), kind, shape, f"file://{directory}/store", str(ranks), str(steps)]
        started = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for rank in range(ranks)
        ]
        done = [each.communicate(timeout=TIMEOUT_S) for each in started]
        if any(each.returncode for each in started):
            raise Failed(done[0][1].strip().splitlines()[-1] if done[0][1].strip() else "a rank failed")
        return float(json.loads(done[0][0].splitlines()[-1]))


def rows(options: Options) -> list[Row]:
    steps = 10 if options.quick else 40
    found: list[Row] = []
    for key, shape, times in (("small", "many small parameters", 2.0), ("gpt14m", "14M", 1.1)):
        found.append(
            Row(
                key=key,
                title=f"FSDP step on 2 Gloo ranks, {shape}",
                base="fsdp2",
                unit="ms",
                contenders=[
                    Contender(name=kind, sample=partial(step_ms, kind, shape, 2, steps)) for kind in ("fsdp2", "argosy")
                ],
                goals=[Goal(of="argosy", times_of="fsdp2", times=times)],
            )
        )
    return found


if __name__ == "__main__":
    sys.exit(run_benches("A step as one graph, beside eager FSDP2.", rows))
