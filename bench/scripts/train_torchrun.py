"""The same training under torchrun with DCP, for ever.   train_torchrun.py HOME SAVE_EVERY

It saves every so many steps, keeps the last two, and goes on from the newest that is whole.
"""

import os
import shutil
import sys
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from stepping import Steps, model_and_seed, optimizer_of, train
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel as DDP

home, every = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DDP(model_and_seed())
optimizer = optimizer_of(model)
newest = home / "newest"
step = int(newest.read_text()) if newest.exists() else 0


def state() -> dict[str, object]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def save() -> None:
    dcp.save(state(), checkpoint_id=home / f"step{step}")
    if rank == 0:
        (home / "newest.part").write_text(str(step))
        os.replace(home / "newest.part", newest)
        shutil.rmtree(home / f"step{step - 2 * every}", ignore_errors=True)


if step:
    found = state()
    dcp.load(found, checkpoint_id=home / f"step{step}")
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
steps = Steps(sys.argv[1], rank)
while True:
    steps.begin()
    train(model, optimizer)
    optimizer.zero_grad()
    step += 1
    steps.counts(step)
    if step % every == 0:
        save()
