"""Faults are put into a script on four ranks; the first verdict names each, and a clean run has none.

The whole campaign is `ARGOSY_MATRIX_ROUNDS=20 pytest -s -m soak tests/journeys/test_fault_matrix.py`, a part of it
`-k slow_rank`. After each run the confusion matrix is printed. Nothing may run beside it on a machine with few cores:
then the magnitudes, which are seconds by the wall clock, still hold, but a run takes several times as long.
"""

import json
import os
import re
import statistics
from collections import Counter

import pytest
from console import REPOSITORY, Console

SCRIPT = str(REPOSITORY / "tests" / "journeys" / "scripts" / "faulty.py")
ROUNDS = int(os.environ.get("ARGOSY_MATRIX_ROUNDS", "3"))
RIGHT_MIN = 0.95
EXPECTED = {
    "slow_data": "input_bound",
    "slow_rank": "straggler",
    "slow_disk": "checkpoint_bound",
    "gc_storm": "gc_pauses",
    "lock": "lock_contention",
    "leak": "memory_growth",
    "missing_collective": "missing_collective",
    "mismatched_shape": "mismatched_shape",
    "small_batch": "small_batch",
    "none": "nothing",
}
STEPS = {"leak": 150, "none": 300, "missing_collective": 40, "mismatched_shape": 40}
FAILING = {"missing_collective", "mismatched_shape"}
BOOKED_AS = {"slow_data": "data", "slow_rank": "host", "slow_disk": "checkpoint", "gc_storm": "gc"}
"""The class whose seconds must be those of the fault, by the script's own clock."""
NEAR = 0.1
seen: Counter[tuple[str, str]] = Counter()


def first_verdict(console: Console, fault: str, number: int) -> tuple[str, float]:
    """Run the script; returns the kind of the first verdict, and booked by injected seconds (1 if not compared)."""
    name = f"{fault}-{number}"
    ended = console.argosy("run", "-n", "4", "--name", name, SCRIPT, fault, str(STEPS.get(fault, 60)))
    assert (ended.code == 0) == (fault not in FAILING), ended.text
    speed = json.loads(console.argosy("why", name, "--json").out)["speed"]
    kind = speed["verdicts"][0]["kind"] if speed["verdicts"] else "nothing"
    if fault not in BOOKED_AS:
        return kind, 1.0
    logs = {log.name.split(".")[0]: log for log in (console.cwd / "runs" / name / "logs").glob("*/*.out")}
    injected = {rank: float(re.findall(r"injected (\S+) s", log.read_text())[0]) for rank, log in logs.items()}
    seconds = {rank: speed["ledger"][rank].get(BOOKED_AS[fault], 0.0) for rank in injected}
    usual = statistics.median([seconds[rank] for rank in injected if not injected[rank]] or [0.0])  # Without the fault.
    booked = sum(seconds[rank] - usual for rank in injected if injected[rank])
    return kind, booked / sum(injected.values())


def matrix() -> str:
    """Rows are faults, columns what was said."""
    said = sorted({column for _, column in seen})
    rows = [fault for fault in EXPECTED if any(row == fault for row, _ in seen)]
    lines = [f"{'':20}" + "".join(f"{column:>20}" for column in said)]
    lines += [f"{fault:20}" + "".join(f"{seen[fault, column]:>20}" for column in said) for fault in rows]
    return "\n".join(lines)


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("fault", EXPECTED)
def test_the_first_verdict_names_the_fault_in_most_runs(console: Console, fault: str) -> None:
    for number in range(ROUNDS):
        kind, booked = first_verdict(console, fault, number)
        seen[fault, kind] += 1
        print(f"\n{fault} {number}: {kind}, booked {booked:.1%} of what was injected\n{matrix()}", flush=True)
        assert abs(booked - 1) < NEAR, matrix()
    needed = ROUNDS if fault == "none" else RIGHT_MIN * ROUNDS
    assert seen[fault, EXPECTED[fault]] >= needed, matrix()
