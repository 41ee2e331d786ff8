"""A small GPT-like training on a token file, as people write them: DDP, gradient accumulation, a Saver.

torchrun --nproc-per-node 2 tokens.py train.bin STEPS
"""

import contextlib
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from argosy.checkpoint import Saver, StepNotFound, restore
from argosy.data import Loader, Tokens


def say(*words: object) -> None:
    """One write for a whole line: print writes piece by piece where Python is unbuffered, and ranks share the file."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def main() -> None:
    source, steps = Tokens(sys.argv[1], length=16), int(sys.argv[2])
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 256))
    model = DistributedDataParallel(plain) if ranks > 1 else plain
    optimizer = torch.optim.AdamW(model.parameters())
    data = Loader(source, batch=16, micro=4, workers=1)
    state = {"model": model, "optimizer": optimizer, "data": data}
    saver = Saver("kept")
    with contextlib.suppress(StepNotFound):
        restore("kept", into=state)
    say("PID", os.environ.get("RANK", "0"), os.getpid())
    while data.step < steps:
        ids: list[int] = []
        for x, y in data.batches():
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            ids += data.handed.ids
        optimizer.step()
        optimizer.zero_grad()
        say("STEP", data.step, os.environ.get("RANK", "0"), *ids)
        data.commit()
        if os.environ.get("HOLD_AT") == str(data.step - 1) and os.environ["RANK"] == "1":
            time.sleep(600)  # To be killed at a known step.
        if data.step % 5 == 0:
            saver.save(state, data.step).wait(60)  # The test wants to know which step is there when it kills.
    saver.close()
    data.close()
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
