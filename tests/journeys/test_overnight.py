"""A detached run loses rank 2 to SIGKILL, goes on, and dies of rank 1's exception; what `argosy why` says."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

from console import Console, said, until

from argosy.core import parse_ranks

SCRIPT = Path(__file__).with_name("scripts") / "night.py"


def test_the_next_morning(console: Console) -> None:
    shutil.copy(SCRIPT, console.cwd)
    began = console.argosy("run", "-n", "4", "-d", "--name", "night", "--max-restarts", "1", "night.py")
    assert began.code == 0, began.text
    directory = Path(console.ps("night")["dir"])
    killed = console.pid("night", 2)
    said(next_log(directory, "2.0.out"), r"rank 2 step 5 ")
    os.kill(killed, signal.SIGKILL)

    ended = until(lambda: (now := console.ps("night"))["state"] == "ended" and now, "the end of the run")
    assert ended["code"] == 1

    why = console.argosy("why", "night")
    screen = why.out.decode()
    assert why.code == 0, why.text
    assert len(screen.splitlines()) <= 45, screen
    assert max(map(len, screen.splitlines())) <= 200, screen
    assert screen.count("Traceback") <= 1, screen
    assert "ValueError: corrupt shard: part-00017" in screen, screen
    assert "night.py" in screen
    assert len(re.findall(r"rank 2\b.*killed by SIGKILL", screen)) == 1, screen
    followers = re.search(r"ranks? ([\d,-]+) failed after it", screen)
    assert followers is None or 1 not in parse_ranks(followers[1], 4), screen
    assert re.search(r"rank 1\b.*(ValueError|exit code 1)", screen), screen
    assert re.search(r"ranks 0-3 restarted", screen), screen
    assert re.search(r"rank 1 step 7", screen), screen
    assert re.search(r"argosy run .*night\.py", screen), screen
    assert os.uname().nodename in screen, screen

    facts = json.loads(console.argosy("why", "night", "--json").out)
    assert facts["name"] == "night"
    logs = console.argosy("logs", "night", "--rank", "2").out.decode()
    assert logs.count("rank 2 step 1 ") == 2, "both lives of rank 2 are kept"
    for log in directory.glob("logs/*/*.err"):
        assert "src/argosy/" not in log.read_text(), "a traceback shows the user's frames and torch's"


def next_log(directory: Path, name: str) -> Path:
    """The file of a rank's output, as soon as it exists."""
    (found,) = until(lambda: list(directory.glob(f"logs/*/{name}")), name)
    return found
