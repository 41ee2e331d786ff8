"""Honest work that looks silent: rank 0 evaluates and compiles for long while the others wait for it."""

import sys
import time

import torch
import torch.distributed as dist
from torch import nn


def evaluate(model: nn.Module, seconds: float) -> None:
    end = time.monotonic() + seconds
    model.eval()
    with torch.no_grad():
        while time.monotonic() < end:
            model(torch.ones(64, 64))


def compile_for_long(model: nn.Module, seconds: float) -> None:
    def slow(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> object:
        time.sleep(seconds)
        return graph.forward

    torch.compile(model, backend=slow)(torch.ones(64, 64))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    model = nn.Linear(64, 64)
    for _ in range(12):
        dist.all_reduce(torch.ones(1))
    for work in (evaluate, compile_for_long):
        if dist.get_rank() == 0:
            work(model, float(sys.argv[1]))
        dist.barrier()
    if dist.get_rank() == 0:
        print("all done", flush=True)
    dist.destroy_process_group()
