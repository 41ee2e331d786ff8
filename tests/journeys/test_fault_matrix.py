"""Faults are put into a script on four ranks; the first verdict names each, and a clean run has none.

`ARGOSY_MATRIX_ROUNDS=20` runs each fault twenty times. The confusion matrix is printed: `pytest -s`.
"""

import json
import os
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


def first_verdict(console: Console, fault: str, number: int) -> str:
    """Run the script; returns the kind of the first verdict."""
    name = f"{fault}-{number}"
    ended = console.argosy("run", "-n", "4", "--name", name, SCRIPT, fault, str(STEPS.get(fault, 60)))
    assert (ended.code == 0) == (fault not in FAILING), ended.text
    verdicts = json.loads(console.argosy("why", name, "--json").out)["speed"]["verdicts"]
    return verdicts[0]["kind"] if verdicts else "nothing"


def matrix(seen: Counter[tuple[str, str]]) -> str:
    """Rows are faults, columns what was said."""
    said = sorted({column for _, column in seen})
    lines = [f"{'':20}" + "".join(f"{column:>20}" for column in said)]
    lines += [f"{fault:20}" + "".join(f"{seen[fault, column]:>20}" for column in said) for fault in EXPECTED]
    return "\n".join(lines)


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
def test_the_first_verdict_names_the_fault_in_most_runs(console: Console) -> None:
    seen: Counter[tuple[str, str]] = Counter()
    for number in range(ROUNDS):
        for fault in EXPECTED:
            seen[fault, first_verdict(console, fault, number)] += 1
        print(f"\n{matrix(seen)}", flush=True)
    right = sum(seen[fault, kind] for fault, kind in EXPECTED.items())
    assert right >= RIGHT_MIN * seen.total(), matrix(seen)
    assert seen["none", "nothing"] == ROUNDS, matrix(seen)
