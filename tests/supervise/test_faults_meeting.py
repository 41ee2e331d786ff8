"""Where ranks meet is no single point of failure: neither the agent nor torch's store."""

import os
import signal

import psutil
import pytest
from console import Console, said, until
from daemons import daemon, ranks, script

pytest.importorskip("torch")

TRAINS = """
import os, time, torch, argosy
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


def weights(text: str) -> set[str]:
    return {line.split("weights ")[1] for line in text.splitlines() if "weights " in line}


def test_a_rank_and_the_agent_killed_in_one_instant_change_no_bit(host: Console) -> None:
    (host.cwd / "go").touch()
    undisturbed = host.argosy("run", "-n", "2", "--name", "calm", script(host, TRAINS))
    assert undisturbed.code == 0, undisturbed.text
    (host.cwd / "go").unlink()
    out = host.cwd / "out"
    client = host.start("run", "-n", "2", "--name", "killed", "s.py", out=out)
    until(lambda: [rank for rank in ranks(host, "killed", count=2) if rank.steps == 20], "step 20")
    agent, rank = daemon(host, "agent"), ranks(host, "killed", count=2)[1].pid
    for pid in (agent, rank):
        os.kill(pid, signal.SIGKILL)
    (host.cwd / "go").touch()
    assert client.wait(120) == 0, out.read_text()
    assert weights(out.read_text()) == weights(undisturbed.text)
    assert len(weights(out.read_text())) == 1


def test_a_store_of_torchs_that_is_killed_is_replaced(host: Console) -> None:
    out = host.cwd / "out"
    client = host.start("run", "-n", "2", "--name", "meets", script(host, MEETS), out=out)
    said(out, "met")
    zygotes = [psutil.Process(pid).ppid() for pid in (rank.pid for rank in ranks(host, "meets", count=2))]
    stores = [child for child in psutil.Process(zygotes[0]).children() if "argosy: store" in " ".join(child.cmdline())]
    assert len(stores) == 1
    stores[0].kill()
    (host.cwd / "go").touch()
    assert client.wait(120) == 0, out.read_text()
    assert "again" in out.read_text()
