"""A user asks why an unchanged script is slow, changes it, and compares."""

import json
import re
from typing import Any

import pytest
from console import REPOSITORY, Console

# Work that runs at the same time is a fault of its own, so nothing may run beside these.
pytestmark = pytest.mark.soak
SCRIPT = str(REPOSITORY / "tests" / "journeys" / "scripts" / "faulty.py")
EXPECTED = {
    "slow_data": "input_bound",
    "slow_rank": "straggler",
    "slow_disk": "checkpoint_bound",
    "gc_storm": "gc_pauses",
    "lock": "lock_contention",
    "leak": "memory_growth",
}


def train(console: Console, fault: str, steps: int = 60) -> dict[str, Any]:
    """Run the script on four ranks; returns what `argosy why --json` says of its speed."""
    ended = console.argosy("run", "-n", "4", "--name", fault, SCRIPT, fault, str(steps))
    assert ended.code == 0, ended.text
    asked = console.argosy("why", fault, "--json")
    assert asked.code == 0, asked.text
    return json.loads(asked.out)["speed"]


@pytest.mark.parametrize("fault", EXPECTED)
def test_the_first_verdict_names_the_fault(console: Console, fault: str) -> None:
    speed = train(console, fault, steps=150 if fault == "leak" else 60)
    kinds = [verdict["kind"] for verdict in speed["verdicts"]]
    assert kinds[:1] == [EXPECTED[fault]], speed["verdicts"]
    if fault == "slow_rank":
        assert speed["verdicts"][0]["ranks"] == [2]


def test_input_bound_then_removed_then_compared(console: Console) -> None:
    slow = train(console, "slow_data")
    seen = sum(ranks["data"] for ranks in slow["ledger"].values())
    outputs = [log.read_text() for log in (console.cwd / "runs" / "slow_data" / "logs").glob("*/*.out")]
    assert seen > 0.9 * sum(float(re.findall(r"injected (\S+) s", text)[0]) for text in outputs)
    said = console.argosy("why", "slow_data").text
    assert "waits for its input" in said
    clean = train(console, "none", steps=600)
    assert "input_bound" not in [verdict["kind"] for verdict in clean["verdicts"]]
    compared = json.loads(console.argosy("compare", "slow_data", "none", "--json").out)
    (gone,) = [each for each in compared["gone"] if each["kind"] == "input_bound"]
    assert 0.0 < gone["predicted"] < 1.0
    assert 0.0 < gone["real"] < 1.0
    assert console.argosy("compare", "none", "slow_data", "--fail-if-slower", "3%").code == 1
    assert console.argosy("compare", "slow_data", "none", "--fail-if-slower", "3%").code == 0
    told = json.loads(console.argosy("sql", "slow_data", "SELECT sum(seconds) s FROM ledger", "--json").out)
    record = json.loads((console.cwd / "runs" / "slow_data" / "run.json").read_text())
    assert told[0]["s"] == pytest.approx(4 * (record["ended_at"] - record["started_at"]), rel=0.001)
    page = console.argosy("report", "slow_data")
    assert page.code == 0, page.text
    text = (console.cwd / "runs" / "slow_data" / "report.html").read_text()
    assert "waits for its input" in text
    assert "http" not in text.replace("http-equiv", "")
