"""A rank that says when it is there and then stays.   steady.py DIR {plain|torch|gloo}

It writes DIR/<rank>.<pid> with the time at which it was ready. `gloo` trains: all ranks reduce 50 times a second, so
that the loss of one breaks the others, as in a real run. SIGUSR2 makes it leave with exit code 42.
"""

import os
import signal
import sys
import time
from pathlib import Path

home, kind = Path(sys.argv[1]), sys.argv[2]
rank = os.environ.get("RANK", "0")


def ready() -> None:
    part = home / f"part-{os.getpid()}"
    part.write_text(f"{time.time():.6f}")
    part.rename(home / f"{rank}.{os.getpid()}")


if kind != "gloo":
    signal.signal(signal.SIGUSR2, lambda *_: os._exit(42))
if kind == "plain":
    ready()
    while True:
        signal.pause()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

value = torch.ones(16)
if kind == "torch":
    ready()
    while True:
        signal.pause()

dist.init_process_group("gloo")
dist.barrier()
ready()
while True:
    time.sleep(0.02)
    dist.all_reduce(value)
