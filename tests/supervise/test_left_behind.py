"""What a rank's helpers keep in /dev/shm goes with the rank, however it ends, as it does under python."""

from pathlib import Path

import pytest
from console import PATIENCE_S, Console, said, until

SCRIPT = """\
import multiprocessing, os, signal, sys, time
if __name__ == "__main__":
    locks = [multiprocessing.get_context("spawn").Lock() for _ in range(20)]
    with open(f"held.{os.environ['RANK']}", "w") as held:
        held.write(" ".join(lock._semlock.name for lock in locks))
    while not all(os.path.exists(f"held.{rank}") and os.path.getsize(f"held.{rank}") for rank in range(4)):
        time.sleep(0.01)
    print("held", flush=True)
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL) if sys.argv[1] == "dies" else time.sleep(600)
"""


@pytest.mark.system
@pytest.mark.parametrize("how", ["dies", "stopped"])
def test_semaphores_of_multiprocessing_go_with_their_rank(console: Console, how: str) -> None:
    """Its resource tracker unlinks them when the rank is gone: it must live that long."""
    (console.cwd / "holds.py").write_text(SCRIPT)
    out = console.cwd / "out.txt"
    run = console.start("run", "-n", "4", "--name", "holds", "holds.py", how, out=out)
    said(out, "held")
    names = [name for held in console.cwd.glob("held.*") for name in held.read_text().split()]
    files = [Path("/dev/shm") / f"sem.{name.lstrip('/')}" for name in names]
    assert len(files) == 80
    if how == "stopped":
        assert console.argosy("stop", "holds").code == 0
    assert run.wait(PATIENCE_S) != 0
    until(lambda: not [file for file in files if file.exists()], "all semaphores unlinked")
