"""Train with FSDP2 on 4 ranks under plain torchrun; kill -9 all; go on with 2 ranks; look at it without any."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import argosy
from argosy.checkpoint import restore

SCRIPT = Path(__file__).parent / "scripts/three_lines.py"


def torchrun(ranks: int, *args: object) -> "subprocess.Popen[str]":
    env = os.environ | {
        "PYTHONPATH": str(Path(argosy.__file__).parents[1]),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(SCRIPT)]
    return subprocess.Popen(
        [*command, *map(str, args)], env=env, stdout=subprocess.PIPE, text=True, start_new_session=True
    )


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.system
@pytest.mark.timeout(400)
def test_killed_on_four_ranks_it_goes_on_with_two(tmp_path: Path):
    with torchrun(4, tmp_path / "run", 2, "wait") as first:
        assert first.stdout
        try:
            assert first.stdout.readline() == "begins at 0\n"
            lines = iter(first.stdout.readline, "")
            assert next(line for line in lines if line == "durable 2\n")
            for pid in children(first.pid):
                os.kill(pid, signal.SIGKILL)
        finally:
            os.killpg(first.pid, signal.SIGKILL)
    before = restore(tmp_path / "run")
    assert before.step == 2
    with torchrun(2, tmp_path / "run", 2) as second:
        assert second.stdout
        assert second.stdout.read() == "begins at 2\n"
        assert second.wait(60) == 0
    with torchrun(2, tmp_path / "run", 3) as third:
        assert third.stdout
        assert third.stdout.read() == "begins at 2\ndurable 3\n"
    after = restore(tmp_path / "run", step=2)
    assert all(torch.equal(after.tensors[name], tensor) for name, tensor in before.tensors.items())
    assert restore(tmp_path / "run").step == 3
