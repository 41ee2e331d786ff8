"""What a rank's helpers keep in /dev/shm goes with the rank, however it ends, as it does under python."""

from pathlib import Path

import pytest
from console import Console, said, until

SCRIPT = """\
import multiprocessing, os, signal, sys, time
if __name__ == "__main__":
    locks = [multiprocessing.get_context("spawn").Lock() for _ in range(4)]
    print("held", *(lock._semlock.name for lock in locks), flush=True)
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL) if sys.argv[1] == "dies" else time.sleep(600)
"""


@pytest.mark.parametrize("how", ["dies", "stopped"])
def test_semaphores_of_multiprocessing_go_with_their_rank(console: Console, how: str) -> None:
    """Its resource tracker unlinks them when the rank is gone: it must live that long."""
    (console.cwd / "holds.py").write_text(SCRIPT)
    out = console.cwd / "out.txt"
    run = console.start("run", "--name", "holds", "holds.py", how, out=out)
    names = said(out, r"^held (.*)$")[1].split()
    files = [Path("/dev/shm") / f"sem.{name.lstrip('/')}" for name in names]
    assert len(files) == 4
    if how == "stopped":
        assert console.argosy("stop", "holds").code == 0
    assert run.wait(60) != 0
    until(lambda: not [file for file in files if file.exists()], "all semaphores unlinked", 5.0)
