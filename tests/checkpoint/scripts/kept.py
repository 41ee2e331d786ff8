"""Two ranks train under `argosy run` with three lines; in the first generation all of them are killed."""

import os
import signal
from contextlib import suppress

import torch
import torch.distributed as dist

from argosy.checkpoint import Saver, StepNotFound, restore

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
state, step = {"model": model, "optimizer": optimizer}, 0
saver = Saver("here", replicated=[model])
with suppress(StepNotFound):
    restored = restore("here", into=state)
    step = restored.step
    print(restored, flush=True)
while step < 6:
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    saver.save(state, step).copied.result(60)
    dist.barrier()
    if step == 4 and os.environ["ARGOSY_GENERATION"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
saver.close()
print("ends at", step, flush=True)
