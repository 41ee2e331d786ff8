"""A rank that the kernel kills for its memory is named so."""

from pathlib import Path

import pytest
from console import Console, until
from daemons import ranks


@pytest.mark.system
def test_a_rank_killed_for_its_memory_is_named_so(small_memory: Path, cold_console: Console):
    console = cold_console  # Its daemons are in the cgroup.
    (console.cwd / "eats.py").write_text(
        "import os, time\n"
        "while not os.path.exists('go'): time.sleep(0.01)\n"
        "if os.environ['RANK'] == '1': hoard = bytearray(os.urandom(1 << 20) * 1000)\n"
        "time.sleep(600)\n"
    )
    inside = f'echo $$ > {small_memory}/cgroup.procs; exec "$@"'
    words = ["run", "-d", "-n", "2", "--name", "hungry", "--", "python3", "eats.py"]
    assert console.run(["sh", "-c", inside, "sh", console.python, "-m", "argosy", *words]).code == 0
    ranks(console, "hungry")
    (console.cwd / "go").touch()
    until(lambda: console.ps("hungry").get("state") == "ended", "the end")
    assert console.ps("hungry")["code"] == 137
    why = console.argosy("why", "hungry").text
    assert "rank 1" in why
    assert "out of memory" in why
