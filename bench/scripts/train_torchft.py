"""The same training under torchft: this process is one replica of four, for ever.   train_torchft.py HOME

Started again by whoever started it; state comes from a living replica.
"""

import logging
import os
import sys
from datetime import timedelta

import torch.distributed as dist
from stepping import Steps, model_and_seed, optimizer_of, train
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

logging.disable(logging.WARNING)
rank = int(os.environ["REPLICA"])
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
plain = model_and_seed()
inner = optimizer_of(plain)


def load(state: dict[str, dict[str, object]]) -> None:
    plain.load_state_dict(state["model"])
    inner.load_state_dict(state["optimizer"])


manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
    load_state_dict=load,
    state_dict=lambda: {"model": plain.state_dict(), "optimizer": inner.state_dict()},
    min_replica_size=1,
    rank=0,
    world_size=1,
    store_addr="127.0.0.1",
    store_port=store.port,
    replica_id=f"replica{rank}",
    hostname="127.0.0.1",
    timeout=timedelta(seconds=10),
    quorum_timeout=timedelta(seconds=60),
)
model, optimizer = DistributedDataParallel(manager, plain), Optimizer(manager, inner)
steps = Steps(sys.argv[1], rank)
before = manager.current_step()
while True:
    optimizer.zero_grad()  # which begins a quorum
    train(model, optimizer)
    if manager.current_step() > before:
        before = manager.current_step()
        steps.counts(before)
