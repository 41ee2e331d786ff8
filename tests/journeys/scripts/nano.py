"""A small training script as people write them for torchrun: DDP and a DataLoader."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Digits(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = torch.randn(16, generator=torch.Generator().manual_seed(index))
        return row, row.sum()


def main() -> None:
    dist.init_process_group(backend="gloo")
    rank, local_rank, world = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    torch.manual_seed(1337)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(replica.parameters(), lr=1e-2)
    sampler = DistributedSampler(Digits(), seed=1)
    loader = DataLoader(Digits(), batch_size=8, sampler=sampler)
    loss = torch.zeros(())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for rows, sums in loader:
            loss = nn.functional.mse_loss(replica(rows).squeeze(1), sums)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
    dist.all_reduce(loss.detach())
    weights = sum(parameter.double().sum().item() for parameter in model.parameters())
    if rank == 0:
        print("RESULT", f"{loss.item():.9f} {weights:.12f}", world, local_rank, sys.argv, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
