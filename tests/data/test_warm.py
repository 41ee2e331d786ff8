"""Workers under `argosy run`: forked from the rank's zygote, in the rank's group, and gone with the rank."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
from console import PATIENCE_S, Console, said, until

from argosy.observe import read_spans

SCRIPT = """\
import os, sys, time
import psutil
import torch
from argosy.data import Loader

class Slow:
    def __len__(self): return 40
    def __getitem__(self, index):
        while index == 0 and not os.path.exists("go"): time.sleep(0.02)
        return index, os.getpid(), os.getppid(), os.getpgrp()

if "orphaned" in sys.argv:
    psutil.Process().parent().kill()
loader = Loader(Slow(), 8, 4, epochs=1, workers=1)
seen = []
for index, worker, template, group in loader:
    if not seen:
        print("FROM", os.getpid(), worker[0].item(), template[0].item(), group[0].item(), flush=True)
    seen += index.tolist()
print("SEEN", sorted(seen) == list(range(40)), flush=True)
"""


def begin(console: Console, *words: str) -> tuple[subprocess.Popen[bytes], Path, list[int]]:
    """Start the script; returns when a worker has made something and is held up by the next."""
    (console.cwd / "loads.py").write_text(SCRIPT)
    out = console.cwd / "out.txt"
    run = console.start("run", "-n", "1", "--name", "warm", *words, out=out)
    return run, out, list(map(int, said(out, r"FROM (\d+) (\d+) (\d+) (\d+)").groups()))


def gone(*pids: int) -> bool:
    return not any(psutil.pid_exists(pid) for pid in pids)


def test_the_zygote_forks_the_workers_into_the_group_of_the_rank(console: Console) -> None:
    run, out, (rank, worker, template, group) = begin(console, "loads.py")
    zygote = psutil.Process(psutil.Process(rank).ppid())
    assert zygote.cmdline()[0].startswith("argosy: zygote")
    assert psutil.Process(template).ppid() == zygote.pid
    assert group == rank
    (console.cwd / "go").touch()
    assert run.wait(PATIENCE_S) == 0
    assert said(out, "SEEN True")
    until(lambda: gone(worker, template), "worker and template gone")


def test_the_wait_for_data_is_a_span_that_others_can_read_while_it_lasts(console: Console) -> None:
    run, _, _ = begin(console, "loads.py")
    (ring,) = console.segments.glob("*/0.0.page.spans")

    def held_up() -> bool:
        return read_spans(ring)[-1].end == 0

    until(held_up, "a wait that goes on")
    *before, last = read_spans(ring)
    assert {each.name for each in [*before, last]} == {"data"}
    assert all(each.end >= each.begin for each in before)
    assert [each.step for each in [*before, last]] == sorted(each.step for each in [*before, last])
    (console.cwd / "go").touch()
    assert run.wait(PATIENCE_S) == 0


def test_workers_that_are_busy_end_with_their_rank(console: Console) -> None:
    run, _, (rank, worker, template, _) = begin(console, "loads.py")
    os.kill(rank, signal.SIGKILL)
    assert run.wait(PATIENCE_S) != 0
    until(lambda: gone(worker, template), "worker and template gone")


def test_without_a_zygote_the_template_is_executed(console: Console) -> None:
    """The rank is a program, or its zygote was killed."""
    (console.cwd / "go").touch()
    for words in (["--", console.python, "loads.py"], ["loads.py", "orphaned"]):
        run, out, (rank, _, template, _) = begin(console, *words)
        assert run.wait(PATIENCE_S) == 0
        assert said(out, "SEEN True")
        until(lambda rank=rank, template=template: gone(rank, template), "rank and template gone")


STUCK = """\
import os, time
from argosy.data import Loader
class Stuck:
    def __len__(self): return 10
    def __getitem__(self, index): return index
    def __getstate__(self): return {"a": 1}
    def __setstate__(self, state):
        os.write(1, b"LOADING %d\\n" % os.getpid())
        time.sleep(1000)
next(iter(Loader(Stuck(), 4, workers=1)))
"""


def test_t2_a_template_that_is_loading_ends_with_its_loader() -> None:
    with subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        template = psutil.Process(int(process.stdout.readline().split()[1]))
        process.kill()
    assert psutil.wait_procs([template], timeout=300)[1] == []
