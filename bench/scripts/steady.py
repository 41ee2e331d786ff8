"""A rank with torch that says when it is there and then trains for ever.   steady.py DIR {alone|gloo}

It is ready once torch is imported (alone), or past a Gloo barrier (gloo), and tells of its first optimizer step
too. With gloo all ranks reduce in every step, so that the loss of one breaks the others, as in a real run.
"""

import sys
import time

import torch
import torch.distributed as dist
from telling import tell

home, together = sys.argv[1], sys.argv[2] == "gloo"
if together:
    dist.init_process_group("gloo")
    dist.barrier()
tell(home, "ready")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
steps = 0
while True:
    model(torch.ones(1, 4)).sum().backward()
    if together:
        dist.all_reduce(model.weight.grad)
    optimizer.step()
    steps += 1
    if steps == 1:
        tell(home, "step")
    time.sleep(0.02 if together else 0.3)
