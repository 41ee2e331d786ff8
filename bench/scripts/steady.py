"""A rank that says when it is there and then stays.   steady.py DIR {plain|step|gloo}

It writes DIR/<rank>.<pid>.ready with the time at which it was ready: at once (plain), with torch imported
(step), or past a Gloo barrier (gloo). The latter two then train, each alone or together, and write `.step`
after the first optimizer step; so with gloo the loss of one breaks the others, as in a real run. SIGUSR2 ends
it with exit code 42.
"""

import os
import signal
import sys
import time
from pathlib import Path

home, kind = Path(sys.argv[1]), sys.argv[2]


def say(what: str) -> None:
    part = home / f"part-{os.getpid()}"
    part.write_text(f"{time.time():.6f}")
    part.rename(home / f"{os.environ['RANK']}.{os.getpid()}.{what}")


def leave(*_: object) -> None:
    os._exit(42)


def stay() -> None:
    say("ready")
    while True:
        signal.pause()


def train() -> None:
    import torch
    import torch.distributed as dist

    model = torch.nn.Linear(4, 4)
    if kind == "gloo":
        dist.init_process_group("gloo")
        dist.barrier()
    say("ready")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    first = True
    while True:
        model(torch.ones(1, 4)).sum().backward()
        if kind == "gloo":
            dist.all_reduce(model.weight.grad)
        optimizer.step()
        if first:
            say("step")
        first = False
        time.sleep(0.02 if kind == "gloo" else 0.3)


signal.signal(signal.SIGUSR2, leave)
stay() if kind == "plain" else train()
