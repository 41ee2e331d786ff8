"""Four ranks train over Gloo until one goes wrong.   trouble.py DIR {raise|hang}

At step 12 rank 2 raises, or rank 3 stays away from the all_reduce; the time of it is written to DIR/trouble.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

home, how = Path(sys.argv[1]), sys.argv[2]


def mark() -> None:
    (home / "part").write_text(f"{time.time():.6f}")
    (home / "part").rename(home / "trouble")


def load_batch(step: int) -> torch.Tensor:
    if how == "hang" and step == 12 and dist.get_rank() == 3:
        mark()
        time.sleep(3600)
    return torch.ones(1, 4)


def check_loss(step: int) -> None:
    if how == "raise" and step == 12 and dist.get_rank() == 2:
        mark()
        raise ValueError("the loss is not finite")


dist.init_process_group("gloo")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(100_000):
    model(load_batch(step)).sum().backward()
    check_loss(step)
    dist.all_reduce(model.weight.grad)
    optimizer.step()
    time.sleep(0.02)
