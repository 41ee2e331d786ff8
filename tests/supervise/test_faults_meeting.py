"""Where ranks meet is no single point of failure: neither the agent nor torch's store."""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest
from console import PATIENCE_S, Console, said, until
from daemons import daemon, ranks, script

pytest.importorskip("torch")

TRAINS = """
import json, os, time, torch, argosy
if os.environ.get("RANK") == "1" and not os.path.exists("environ"):
    with open("environ.new", "w") as file:
        json.dump(dict(os.environ), file)
    os.rename("environ.new", "environ")
run = argosy.Run(seed=0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model = torch.nn.parallel.DistributedDataParallel(model)
run.track(model=model, optimizer=optimizer)
for step in run.steps(until=40):
    with step:
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    while run.step == 20 and not os.path.exists("go"):
        time.sleep(0.01)
print("weights", float(sum(p.detach().sum() for p in model.parameters())), flush=True)
"""

MEETS = """
import os, time
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
print("met", flush=True)
while not os.path.exists("go"):
    time.sleep(0.01)
rank = dist.get_rank()
address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False)
store.set(f"again/{rank}", "yes")
store.wait(["again/0", "again/1"])
print("again", flush=True)
os._exit(0)
"""


GROUPED = """
import os, time
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
print("met", flush=True)
while not os.path.exists("go"):
    time.sleep(0.01)
dist.barrier()
os._exit(0)
"""


def stores(host: Console, name: str) -> list[psutil.Process]:
    """The processes that serve torch's store."""
    zygote = psutil.Process(psutil.Process(ranks(host, name, count=2)[0].pid).ppid())
    return [child for child in zygote.children() if "argosy: store" in " ".join(child.cmdline())]


def weights(text: str) -> set[str]:
    return {line.split("weights ")[1] for line in text.splitlines() if "weights " in line}


@pytest.mark.system
def test_a_rank_and_the_agent_killed_in_one_instant_change_no_bit(host: Console) -> None:
    (host.cwd / "go").touch()
    undisturbed = host.argosy("run", "-n", "2", "--name", "calm", script(host, TRAINS))
    assert undisturbed.code == 0, undisturbed.text
    (host.cwd / "go").unlink()
    out = host.cwd / "out"
    client = host.start("run", "-n", "2", "--name", "killed", "s.py", out=out)
    until(lambda: [rank for rank in ranks(host, "killed", count=2) if rank.steps == 20], "step 20")
    assert stores(host, "killed") == []  # A run needs none.
    agent, rank = daemon(host, "agent"), ranks(host, "killed", count=2)[1].pid
    for pid in (agent, rank):
        os.kill(pid, signal.SIGKILL)
    (host.cwd / "go").touch()
    assert client.wait(PATIENCE_S) == 0, out.read_text()
    assert weights(out.read_text()) == weights(undisturbed.text)
    assert len(weights(out.read_text())) == 1


@pytest.mark.system
def test_a_process_of_an_old_generation_can_not_join_a_run(host: Console) -> None:
    out = host.cwd / "out"
    client = host.start("run", "-n", "2", "--name", "joined", script(host, TRAINS), out=out)
    until(lambda: [rank for rank in ranks(host, "joined", count=2) if rank.steps == 20], "step 20")
    os.kill(ranks(host, "joined", count=2)[1].pid, signal.SIGKILL)
    ranks(host, "joined", generation=1, count=1)
    environ = json.loads((host.cwd / "environ").read_text())
    old = subprocess.run(
        [sys.executable, "s.py"], cwd=host.cwd, env=environ, capture_output=True, text=True, timeout=300
    )
    assert old.returncode == 1
    assert "rank 1 of generation 0 is not in view 2 of the run" in old.stderr
    (host.cwd / "go").touch()
    assert client.wait(PATIENCE_S) == 0, out.read_text()
    assert len(weights(out.read_text())) == 1


def test_a_store_of_torchs_that_is_killed_is_replaced(host: Console) -> None:
    out = host.cwd / "out"
    client = host.start("run", "-n", "2", "--name", "meets", script(host, MEETS), out=out)
    said(out, "met")
    (store,) = stores(host, "meets")
    store.kill()
    (host.cwd / "go").touch()
    assert client.wait(PATIENCE_S) == 0, out.read_text()
    assert "again" in out.read_text()


@pytest.mark.parametrize("index", [0, 1])
def test_a_rank_and_its_store_killed_in_one_instant_are_restarted_with_an_empty_store(
    host: Console, index: int
) -> None:
    out = host.cwd / "out"
    client = host.start("run", "-n", "2", "--max-restarts", "1", "--name", "both", script(host, GROUPED), out=out)
    logs = host.cwd / "runs/both/logs/1"
    for rank in range(2):
        said(logs / f"{rank}.0.out", "met")
    (store,), victim = stores(host, "both"), ranks(host, "both", count=2)[index]
    for pid in (victim.pid, store.pid):
        os.kill(pid, signal.SIGKILL)
    for rank in range(2):
        said(logs / f"{rank}.1.out", "met")
    (host.cwd / "go").touch()
    assert client.wait(PATIENCE_S) == 0, out.read_text()
