"""Out of memory, told from counters; one test lets the kernel kill for real."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from argosy.core import WaitStatus
from argosy.supervise.evidence.oom import OomCounter, OomSample, OomWatch, again, explain_oom, oom_counters
from argosy.supervise.processes import process_id

KILLED = WaitStatus(signal=signal.SIGKILL)
CGROUP = Path("/sys/fs/cgroup/memory")


def sample(kills: int, *, used: int = 10, limit: int = 100, host: float = 0.3) -> OomSample:
    return OomSample((OomCounter("/job", "/sys/fs/cgroup/job", kills, limit << 20, used << 20),), host)


def test_a_counted_kill_is_certain():
    said = explain_oom([sample(1)], sample(2), KILLED, asked=False)
    assert said == "the memory cgroup /job counted an oom kill (limit 100 MiB)"


def test_pressure_makes_it_probable():
    said = explain_oom([sample(1, used=97)], sample(1), KILLED, asked=False)
    assert said == "probably: SIGKILL that was not ours while /job was at 97% of its memory"
    said = explain_oom([sample(1, host=0.97)], sample(1), KILLED, asked=False)
    assert said == "probably: SIGKILL that was not ours while memory was at 97%"


@pytest.mark.parametrize(
    ("status", "asked"),
    [(KILLED, True), (WaitStatus(signal=signal.SIGSEGV), False), (WaitStatus(code=1), False)],
)
def test_other_ends_are_not_blamed_on_memory(status: WaitStatus, asked: bool):
    assert explain_oom([sample(1, used=99)], sample(2), status, asked=asked) == ""


def test_a_kill_without_pressure_is_just_a_kill():
    assert explain_oom([sample(1)], sample(1), KILLED, asked=False) == ""


def test_a_death_is_counted_before_it_is_heard_of():
    said = explain_oom([sample(1), sample(2)], sample(2), KILLED, asked=False)
    assert said == "the memory cgroup /job counted an oom kill (limit 100 MiB)"
    said = explain_oom([sample(1), sample(1, used=97), sample(1)], sample(1), KILLED, asked=False)
    assert said.startswith("probably: SIGKILL that was not ours while /job was at 97%")


def test_a_death_of_long_ago_is_not_this_one():
    watch, process = OomWatch(), process_id(os.getpid())
    watch._samples[process] = [sample(1)]
    for now in range(10):
        watch.sample(float(now))
    assert sample(1) not in watch._samples[process]


def test_a_unified_hierarchy_is_read(tmp_path: Path):
    mine = tmp_path / "job" / "rank0"
    mine.mkdir(parents=True)
    for name, text in {
        "memory.events.local": "low 0\noom 1\noom_kill 3\n",
        "memory.max": "max\n",
        "memory.current": "4096\n",
    }.items():
        (mine / name).write_text(text)
    (tmp_path / "job" / "memory.events").write_text("oom_kill 5\n")
    before = OomSample((OomCounter("/job/rank0", str(mine), 2, 0, 0), OomCounter("/job", str(mine.parent), 5, 0, 0)))
    after = again(before)
    assert [counter.kills for counter in after.counters] == [3, 5]
    assert explain_oom([before], after, KILLED, asked=False) == "the memory cgroup /job/rank0 counted an oom kill"


def test_a_process_without_cgroups_has_no_counters(tmp_path: Path):
    assert oom_counters(os.getpid(), root=str(tmp_path / "none")).counters == ()


def test_samples_of_one_cgroup_are_read_once_in_a_moment(tmp_path: Path):
    (tmp_path / "memory.events").write_text("oom_kill 1\n")
    known = OomSample((OomCounter("/job", str(tmp_path), 0, 0, 0),))
    watch, process = OomWatch(), process_id(os.getpid())
    watch._samples[process] = [known]
    kills: list[int] = []
    for now, count in ((12345.678, 1), (12345.7, 2), (12346.0, 3)):
        (tmp_path / "memory.events").write_text(f"oom_kill {count}\n")
        watch.sample(now)
        kills.append(watch._samples[process][-1].counters[0].kills)
    assert kills == [1, 1, 3]


@pytest.mark.system
@pytest.mark.skipif(not os.access(CGROUP, os.W_OK), reason="needs a writable v1 memory cgroup")
def test_a_real_oom_kill_is_counted():
    cgroup = CGROUP / f"argosy-test-{os.getpid()}"
    cgroup.mkdir()
    try:
        (cgroup / "memory.limit_in_bytes").write_text(str(64 << 20))
        script = "import sys; sys.stdin.readline()\nheld = [bytearray(4 << 20) for _ in range(100)]\n"
        with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as process:
            (cgroup / "cgroup.procs").write_text(str(process.pid))
            before = oom_counters(process.pid)
            assert before.counters[0].limit == 64 << 20
            process.communicate(b"\n")
        status = WaitStatus(signal=-process.returncode)
        said = explain_oom([before], again(before), status, asked=False)
        assert said == f"the memory cgroup /{cgroup.name} counted an oom kill (limit 64 MiB)"
    finally:
        cgroup.rmdir()
