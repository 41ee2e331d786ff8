"""The whole way from real ranks to the line that names who hangs: pages, watch, stacks, judgement."""

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from console import PATIENCE_S, until
from warm import warm

from argosy.control.hang_suspect import HangPolicy
from argosy.observe import Page
from argosy.supervise.evidence.hang_samples import HangWatch, Tracker
from argosy.supervise.evidence.hang_verdict import Hang, judge
from argosy.supervise.evidence.proc_sample import read_proc
from argosy.supervise.evidence.stacks import Target, take

pytest.importorskip("torch")

SOURCE = str(Path(__file__).parents[2] / "src")
PRELUDE = """
import os, sys
sys.path.insert(0, sys.argv[1])
import torch, torch._dynamo, torch.distributed as dist
from argosy.observe import Page, Phase, install_when_imported
from argosy.supervise.evidence.stacks import arm
import data
torch.set_num_threads(1)
size, directory = 3, sys.argv[1]
ranks = []
for rank in range(size):  # forked, so that torch is imported once
    ranks.append(os.fork())
    if ranks[-1] == 0:
        break
else:
    print(*ranks, flush=True)
    sys.exit(sum(os.waitpid(pid, 0)[1] for pid in ranks))
arm(f"{directory}/stacks{rank}")
page = Page.create(f"{directory}/page{rank}")
page.set_phase(Phase.USER)
install_when_imported(page)
dist.init_process_group("gloo", store=dist.FileStore(directory + "/store", size), rank=rank, world_size=size)
"""
DATA = """
import os, sys, time
def load(rank, step):
    if rank == 2 and step == 11:
        open(sys.argv[1] + "/stuck", "w").close()
        time.sleep(600)
"""
PLAIN = """
for step in range(20):
    data.load(rank, step)
    dist.all_reduce(torch.ones(1))
"""
DDP = """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(20):
    data.load(rank, step)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""
LEAVES = """
for step in range(20):
    if rank == 2 and step == 11:
        open(directory + "/stuck", "w").close()
        os.kill(os.getpid(), 19)
    dist.all_reduce(torch.ones(1))
"""


class Job:
    """Three ranks that share a Gloo group."""

    def __init__(self, directory: Path, body: str) -> None:
        self.directory = directory
        (directory / "data.py").write_text(DATA)
        script = directory / "train.py"
        script.write_text(PRELUDE + body)
        environment = {**os.environ, "PYTHONPATH": SOURCE, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        self.parent = subprocess.Popen([*warm(), str(script), str(directory)], env=environment, stdout=subprocess.PIPE)
        assert self.parent.stdout is not None
        self.pids = [int(pid) for pid in self.parent.stdout.readline().split()]
        assert len(self.pids) == 3

    def targets(self) -> list[Target]:
        samples = [(pid, read_proc(pid)) for pid in self.pids]
        return [
            Target(rank, pid, sample.start, str(self.directory / f"stacks{rank}"))
            for rank, (pid, sample) in enumerate(samples)
            if sample is not None
        ]

    def watch(self, expected: str) -> Hang:
        """Sample as the agent does, from when the job is stuck until this hang is found.

        On a busy machine another may be found before: a rank that waits for a core is silent too.
        """
        until((self.directory / "stuck").exists, "a job that is stuck")
        tracker, watch = Tracker(), HangWatch(HangPolicy(hang_after_s=1.0))
        pages: dict[int, Page] = {}
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            time.sleep(0.1)
            now = time.monotonic()
            for rank, pid in enumerate(self.pids):
                path = self.directory / f"page{rank}"
                if rank not in pages and path.exists() and path.stat().st_size:
                    pages[rank] = Page.open(path)
                progress = pages[rank].read() if rank in pages else None
                tracker.update(rank, progress, read_proc(pid), now)
            suspect = watch.look(tracker.views(), now)
            if suspect is not None:
                verdict = judge(suspect, take(self.targets()))
                watch.answer(verdict)
                if isinstance(verdict, Hang) and re.fullmatch(expected, verdict.headline):
                    return verdict
        pytest.fail("no hang was found")

    def end(self) -> None:
        if self.parent.poll() is None:  # only then do the pids belong to its ranks for certain
            for pid in self.pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.parent.wait(60)
        assert self.parent.stdout is not None
        self.parent.stdout.close()


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[list[Job]]:
    started: list[Job] = []
    yield started
    for job in started:
        job.end()


def test_a_rank_that_skips_an_all_reduce_is_found(jobs: list[Job], tmp_path: Path):
    jobs.append(Job(tmp_path, PLAIN))
    jobs[0].watch("ranks 0-1 wait in all_reduce #12; rank 2 at data.py:6")
    assert jobs[0].parent.poll() is None


def test_a_rank_that_holds_up_ddp_is_found(jobs: list[Job], tmp_path: Path):
    jobs.append(Job(tmp_path, DDP))
    assert jobs[0].watch("ranks 0-1 wait in .*; rank 2 at data.py:6").culprits == (2,)


def test_a_stopped_rank_is_found_and_the_job_ends_when_it_goes_on(jobs: list[Job], tmp_path: Path):
    jobs.append(Job(tmp_path, LEAVES))
    jobs[0].watch(r"rank 2 is stopped \(SIGSTOP\); ranks 0-1 wait for it in all_reduce #12")
    os.kill(jobs[0].pids[2], signal.SIGCONT)
    assert jobs[0].parent.wait(PATIENCE_S) == 0
