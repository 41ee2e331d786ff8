"""`breakpoint()` in a rank waits for `argosy debug`, and meanwhile nobody hangs."""

import pytest
from console import Console, until

SCRIPT = """
import os
value = 40 + int(os.environ["RANK"])
if os.environ["RANK"] == "1":
    breakpoint()
print("value", value)
"""


@pytest.mark.system
def test_pdb_looks_into_a_rank_and_changes_it(console: Console) -> None:
    (console.cwd / "stops.py").write_text(SCRIPT)
    started = console.argosy("run", "-n", "2", "-d", "--name", "stops", "--hang-after", "1", "stops.py")
    assert started.code == 0, started.text
    logs = console.cwd / "runs" / "stops" / "logs" / "1"
    until(lambda: (logs / "1.0.err").exists() and b"waits at" in (logs / "1.0.err").read_bytes(), "the breakpoint")
    refused = console.argosy("debug", "stops", "--rank", "0")
    assert refused.code == 2
    assert "rank 0 is not at a breakpoint" in refused.text
    asked = console.argosy("debug", "stops", "--rank", "1", stdin=b"p value * 1000\nvalue = 7\nc\n")
    assert asked.code == 0, asked.text
    assert "41000" in asked.text
    until(lambda: console.ps("stops").get("state") == "ended", "the end of the run")
    assert (logs / "1.0.out").read_text() == "value 7\n"
    assert "HangSeen" not in (console.cwd / "runs" / "stops" / "events").read_bytes().decode(errors="replace")


@pytest.mark.system
def test_the_rank_continues_when_debug_disconnects(console: Console) -> None:
    (console.cwd / "stops.py").write_text(SCRIPT)
    assert console.argosy("run", "-n", "2", "-d", "--name", "left", "stops.py").code == 0
    assert console.argosy("debug", "left", "--wait", "200", stdin=b"").code == 0
    until(lambda: console.ps("left").get("state") == "ended", "the end of the run")
    assert (console.cwd / "runs" / "left" / "logs" / "1" / "1.0.out").read_text() == "value 41\n"
