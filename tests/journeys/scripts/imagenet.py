"""A small convolutional network in the shape of the imagenet example: workers, meters, evaluation, the best checkpoint.

One process per rank under torchrun, or, with --spawn, one that starts the others by itself.
"""

import argparse
import os
import shutil
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from torch.utils.tensorboard import SummaryWriter


class Meter:
    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def update(self, value: float, count: int) -> None:
        self.sum, self.count = self.sum + value * count, self.count + count

    def all_reduce(self) -> float:
        both = torch.tensor([self.sum, self.count])
        dist.all_reduce(both)
        return (both[0] / both[1]).item()


class Images(Dataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(index)) + index % 4, index % 4


def main_worker(rank: int, world: int, args: argparse.Namespace) -> None:
    if args.spawn:
        dist.init_process_group("gloo", init_method=f"file://{args.out}/store", rank=rank, world_size=world)
    else:
        dist.init_process_group("gloo")
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
    model = DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    writer = SummaryWriter(args.out / "board") if rank == 0 else None
    context = {"num_workers": args.workers, "multiprocessing_context": args.context if args.workers else None}
    sampler = DistributedSampler(Images(64))
    train = DataLoader(Images(64), batch_size=8, sampler=sampler, drop_last=True, **context)
    val = DataLoader(Images(16), batch_size=8, sampler=DistributedSampler(Images(16), shuffle=False), **context)
    best, loss = 0.0, torch.zeros(())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        losses, began = Meter(), time.monotonic()
        for images, target in train:
            loss = nn.functional.cross_entropy(model(images), target)
            losses.update(loss.item(), len(images))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        right = Meter()
        with torch.no_grad():
            for images, target in val:
                right.update((model(images).argmax(1) == target).float().mean().item(), len(images))
        schedule.step()
        score, mean = right.all_reduce(), losses.all_reduce()
        if writer is not None:
            writer.add_scalar("loss", mean, epoch)
            state = {"epoch": epoch + 1, "state_dict": plain.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, args.out / "checkpoint.pth.tar")
            if score >= best:
                shutil.copyfile(args.out / "checkpoint.pth.tar", args.out / "model_best.pth.tar")
            print(f" * Epoch {epoch} Loss {mean:.5f} Acc@1 {100 * score:.3f}", flush=True)
            assert time.monotonic() > began
        best = max(best, score)
    if writer is not None:
        writer.close()
        print("RESULT", f"{loss.item():.6f} {best:.4f}", sorted(path.name for path in args.out.iterdir()), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--context", choices=["fork", "spawn", "forkserver"])
    parser.add_argument("--spawn", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(exist_ok=True)
    if args.spawn:
        mp.spawn(main_worker, args=(args.spawn, args), nprocs=args.spawn)
    else:
        main_worker(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), args)


if __name__ == "__main__":
    main()
