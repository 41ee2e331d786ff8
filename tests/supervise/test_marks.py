"""Without cgroups a rank's descendants are known by what they carry: its mark, or its progress page."""

import subprocess
import sys
from pathlib import Path

import pytest
from console import PATIENCE_S, until
from daemons import gone

from argosy.supervise.cgroup import MARK, kill_marked

FORKS = """
import mmap, os, sys, time
import setproctitle
with open(sys.argv[1], "r+b") as file:
    page = mmap.mmap(file.fileno(), 4096)
setproctitle.setproctitle("argosy: rank 0 of test")
child = os.fork()
if child == 0:
    os.setsid()
    time.sleep(600)
print(child, flush=True)
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "0.0.page"
    path.write_bytes(bytes(4096))
    return path


def test_what_was_forked_is_found_by_the_page(page: Path):
    said = page.with_name("child")
    with said.open("wb") as out:  # A pipe would be held open by the child.
        subprocess.run([sys.executable, "-c", FORKS, str(page)], stdout=out, check=True)
    child = int(said.read_text())
    kill_marked({"another/main/0.0": f"{page}.other"})
    assert not gone(child)
    kill_marked({"run/main/0.0": str(page)})
    until(lambda: gone(child), "the end of what was forked")


def test_what_was_executed_is_found_by_the_mark():
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    child = subprocess.Popen(sleeper, env={MARK: "run-7/main/0.0"}, start_new_session=True)
    other = subprocess.Popen(sleeper, env={MARK: "run-7/main/0.01"}, start_new_session=True)
    until(lambda: b"sleep" in Path(f"/proc/{child.pid}/cmdline").read_bytes(), "the program")
    kill_marked({"run-7/main/0.0": ""})
    assert child.wait(PATIENCE_S) == -9
    assert other.poll() is None
    other.kill()
    other.wait(300.0)
