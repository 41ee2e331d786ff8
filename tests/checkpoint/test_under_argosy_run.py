"""Under `argosy run` the keeper is there without a word: it outlives a generation, and ends with the run."""

import shutil
from pathlib import Path

from console import Console, until

from argosy.checkpoint import list_steps

SCRIPT = Path(__file__).parent / "scripts/kept.py"


def test_the_next_generation_restores_from_the_keeper(console: Console) -> None:
    shutil.copy(SCRIPT, console.cwd)
    before = set(console.runtime.glob("keeper-*.sock"))
    ended = console.argosy("run", "-n", "2", "--max-restarts", "1", "kept.py")
    assert ended.code == 0, ended.text
    assert "from the keeper of this host in" in ended.text
    assert "ends at 6" in ended.text
    assert list_steps(console.cwd / "here")[0].step == 6
    until(lambda: set(console.runtime.glob("keeper-*.sock")) <= before, "the keeper's end")
