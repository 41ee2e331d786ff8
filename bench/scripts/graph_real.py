"""One rank of bench/graph.py: trains small GPTs as one graph and prints each prediction beside what happened."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from gpt import GPT, Config, loss_of

import argosy
from argosy.cost import load_chip

SHAPES = [
    (width, layers, rows, length)
    for width, layers in ((64, 2), (128, 2), (128, 4), (256, 2), (256, 4))
    for rows, length in ((2, 64), (4, 128))
]
"""Hidden size, layers, rows of a rank, tokens of a row."""


def main(chip: str, store: str, ranks: int, count: int, rank: int) -> None:
    torch.set_num_threads(max(1, (torch.get_num_threads()) // ranks))
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    for width, layers, rows, length in SHAPES[:: len(SHAPES) // count]:
        torch.manual_seed(0)
        config = Config(
            vocab_size=1024,
            hidden_size=width,
            intermediate_size=width * 11 // 4,
            num_hidden_layers=layers,
            max_position_embeddings=length,
        )
        model = GPT(config)
        tokens = torch.randint(config.vocab_size, (rows, length + 1))
        batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        recipe = f"fsdp={ranks} micro={rows}"
        step = argosy.compile(
            model, lambda m, x, y: loss_of(m(x), y), batch, recipe=recipe, chip=load_chip(chip), inductor=False
        )
        assert not step.reason, step.reason
        record = step.record
        assert record is not None
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        while not record.done:
            dist.barrier()
            step(*batch)
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0:
            print(json.dumps({"shape": [width, layers, rows, length], **record.found}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
