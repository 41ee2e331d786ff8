"""`argosy run script.py` without a number of ranks: `argosy.Run` is alone in it, and supervised."""

import os
import signal

import pytest
from console import PATIENCE_S, Console, until
from daemons import ranks, script

pytest.importorskip("torch")

TRAINS = """
import os, time, torch, argosy
run = argosy.Run(seed=0, save_every=1)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.track(model=model, optimizer=optimizer)
for step in run.steps(until=20):
    with step:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    while run.step == 10 and not os.path.exists("go"):
        time.sleep(0.01)
print("grouped", torch.distributed.is_initialized(), "generation", argosy.here().rank.generation, "step", run.step)
"""
SPAWNS = """
import os, tempfile, torch, torch.multiprocessing as mp
import torch.distributed as dist
import argosy

def work(rank, size, file):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size)
    run = argosy.Run("own", seed=0)
    print("rank", run.rank, "of", run.size)
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(work, (2, tempfile.mktemp()), nprocs=2)
"""


@pytest.mark.system
def test_a_run_alone_needs_no_group_and_is_replaced_when_it_is_killed(host: Console) -> None:
    out = host.cwd / "out"
    client = host.start("run", "--name", "solo", script(host, TRAINS), out=out)
    (first,) = until(lambda: [rank for rank in ranks(host, "solo", count=1) if rank.steps == 10], "step 10")
    os.kill(first.pid, signal.SIGKILL)
    ranks(host, "solo", generation=1, count=1)
    (host.cwd / "go").touch()
    assert client.wait(PATIENCE_S) == 0, out.read_text()
    assert "grouped False generation 1 step 20" in out.read_text()


@pytest.mark.system
def test_ranks_that_a_script_starts_are_its_own(host: Console) -> None:
    ended = host.argosy("run", script(host, SPAWNS))
    assert ended.code == 0, ended.text
    assert sorted(line for line in ended.out.decode().splitlines() if line.startswith("rank ")) == [
        "rank 0 of 2",
        "rank 1 of 2",
    ]
