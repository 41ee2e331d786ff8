"""Tensor parallelism in the shape of pytorch/examples: one linear layer by columns, the next one by rows."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 32)
        self.second = nn.Linear(32, 5)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(rows).relu())


def main() -> None:
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    torch.manual_seed(1)
    model = parallelize_module(Toy(), mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25, foreach=True)
    loss = torch.zeros(())
    for step in range(5):
        torch.manual_seed(step)  # The same input on all ranks.
        loss = model(torch.rand(20, 10)).sum()
        loss.backward()
        optimizer.step()
        if mesh.get_rank() == 0:
            print(f"tensor parallel step {step} completed: {loss.item():.4f}", flush=True)
    if mesh.get_rank() == 0:
        print("RESULT", f"{loss.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
