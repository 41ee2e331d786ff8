"""Errors that pass through torch's own calls, logged by the user and then unhandled."""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader


class Broken(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.ones(3, 3)


class Rows:
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        raise LookupError(f"row {index}")


class Sulking(torch.optim.SGD):
    def step(self, closure: object = None) -> None:
        raise ArithmeticError("no step today")


def main(where: str) -> None:
    if where == "forward":
        nn.Sequential(nn.Linear(2, 2), Broken())(torch.ones(2, 2))
    if where == "backward":
        torch.ones(2, requires_grad=True).backward()
    if where == "grad":
        torch.autograd.backward(torch.ones(2, requires_grad=True).double())
    if where == "loader":
        next(iter(DataLoader(Rows())))
    if where == "optimizer":
        Sulking(nn.Linear(1, 1).parameters(), lr=0.1).step()
    if where == "no_group":
        dist.all_reduce(torch.ones(1))
    if where == "collective":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce("not a tensor")


for where in ["forward", "backward", "grad", "loader", "optimizer", "no_group", "collective"]:
    try:
        main(where)
    except Exception:
        logging.exception(where)
main("forward")
