"""What a run costs when nothing fails.   train_cost.py HOME STEPS {run|keeping}

Two ways to make a step take turns in the same processes: with a run and without (`run`, DDP), or with shards kept and
not (`keeping`, FSDP2). Rank 0 writes the milliseconds of each, and their difference, to HOME/cost.json.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Iterator

from gpt import shard
from stepping import model_and_seed, optimizer_of, train
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

import argosy

WARM_UP = 10
home, count, what = sys.argv[1], int(sys.argv[2]), sys.argv[3]
run = argosy.Run(os.path.join(home, "run"), save_every=1 << 30)


def beside_a_plain_loop() -> Iterator[tuple[float, float]]:
    model, plain = DDP(model_and_seed()), DDP(model_and_seed())
    optimizer, other = optimizer_of(model), optimizer_of(plain)
    run.track(model=model, optimizer=optimizer)
    begun = time.perf_counter()
    for step in run.steps(until=count):
        with step:
            run.log(loss=train(model, optimizer))
        middle = time.perf_counter()
        train(plain, other)
        other.zero_grad()
        ended = time.perf_counter()
        yield middle - begun, ended - middle
        begun = ended


def with_and_without_keeping() -> Iterator[tuple[float, float]]:
    model = shard(model_and_seed(), init_device_mesh("cpu", (run.size,)))
    optimizer = optimizer_of(model)
    run.track(model=model, optimizer=optimizer)
    arena, kept = run.arena, 0.0
    begun = time.perf_counter()
    for step in run.steps(until=2 * count):
        run.arena = None if step.number % 2 else arena
        with step:
            run.log(loss=train(model, optimizer))
        ended = time.perf_counter()
        if step.number % 2:
            yield kept, ended - begun
        kept, begun = ended - begun, ended


pairs = list(beside_a_plain_loop() if what == "run" else with_and_without_keeping())[WARM_UP:]
if run.rank == 0:
    columns = {"with": [a for a, _ in pairs], "without": [b for _, b in pairs], "cost": [a - b for a, b in pairs]}
    found = {name: 1000 * statistics.median(values) for name, values in columns.items()}
    with open(os.path.join(home, "cost.part"), "w") as file:
        json.dump(found, file)
    os.replace(os.path.join(home, "cost.part"), os.path.join(home, "cost.json"))
