"""One rank of bench/graph.py: trains a GPT under eager FSDP2 or as one graph; prints milliseconds of a step.

The first number is the median on the clock, the second the least CPU time of this rank, which does not depend on what
else the machine does.
"""

import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from gpt import GPT, Config, loss_of, shard
from torch.distributed.device_mesh import init_device_mesh

SHAPES = {
    "many small parameters": (Config(num_hidden_layers=4), 2, 32),
    "14M": (
        Config(
            vocab_size=4096, hidden_size=320, intermediate_size=864, num_hidden_layers=8, max_position_embeddings=64
        ),
        2,
        64,
    ),
}


def main(kind: str, shape: str, store: str, ranks: int, steps: int, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    torch.manual_seed(0)
    config, rows, length = SHAPES[shape]
    model = GPT(config)
    torch.manual_seed(rank)
    tokens = torch.randint(config.vocab_size, (rows, length + 1))
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss(model, x, y):
        return loss_of(model(x), y)

    if kind.startswith("argosy"):
        import argosy

        compiled = kind == "argosy"
        step = argosy.compile(model, loss, batch, recipe=f"fsdp={ranks} micro={rows}", inductor=compiled)
        assert not step.reason, step.reason
    else:
        model = shard(model, init_device_mesh("cpu", (ranks,)))
        if kind == "fsdp2 compiled":
            for layer in model.layers:
                layer.compile()

        def step(x, y):
            value = loss(model, x, y)
            value.backward()
            return value.detach()

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    took, used = [], []
    for _ in range(steps + 3):
        dist.barrier()
        began, begun = time.perf_counter(), time.process_time()
        step(*batch)
        optimizer.step()
        optimizer.zero_grad()
        took.append((time.perf_counter() - began) * 1e3)
        used.append((time.process_time() - begun) * 1e3)
    if rank == 0:
        print(json.dumps([statistics.median(took[3:]), min(used[3:])]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), int(sys.argv[6]))
