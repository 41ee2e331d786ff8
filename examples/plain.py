"""Train the model of gpt.py on this project's docs, in plain PyTorch, as nanoGPT does. It does not import Argosy.

    python examples/plain.py [directory] [steps]
    torchrun --nproc-per-node 2 examples/plain.py [directory] [steps]
    argosy run -n 2 examples/plain.py [directory] [steps]

It saves a checkpoint after each evaluation and resumes from it when started again. The batches depend on the step, not
on the number of ranks. Takes 20 seconds. Expect an evaluation loss between 2 and 3.
"""

import math
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from gpt import GPT, Config, loss_of
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

out = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/plain")
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 200
batch, micro = 32, 8  # rows of a step over all ranks, rows that go through the model at once
peak_lr, warmup, grad_clip = 3e-3, 20, 1.0
eval_every, eval_batches = 25, 10

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")
accumulate = batch // (micro * world)
torch.manual_seed(0)

# -- data: a file of tokens (here the bytes themselves) for training, another for evaluation ---------------------------
if not (out / "val.bin").exists():  # each rank writes the same, and renames it into place
    out.mkdir(parents=True, exist_ok=True)
    documents = sorted(Path(__file__).parents[1].glob("docs/*.md"))
    tokens = np.frombuffer(b"".join(path.read_bytes() for path in documents), np.uint8).astype(np.uint16)
    for name, part in (("train", tokens[: len(tokens) * 9 // 10]), ("val", tokens[len(tokens) * 9 // 10 :])):
        part.tofile(out / f"{name}.{rank}")
        os.replace(out / f"{name}.{rank}", out / f"{name}.bin")


def get_batch(split: str, seed: int) -> tuple[Tensor, Tensor]:
    data, length = np.memmap(out / f"{split}.bin", np.uint16, "r"), config.max_position_embeddings
    draw = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(data) - length, (micro,), generator=draw).tolist()
    rows = torch.stack([torch.from_numpy(data[start : start + length + 1].astype(np.int64)) for start in starts])
    return rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def evaluate() -> float:
    losses = [loss_of(model(x), y) for x, y in (get_batch("val", seed) for seed in range(eval_batches))]
    return torch.stack(losses).mean().item()


# -- model, optimizer, schedule; from the checkpoint if there is one ---------------------------------------------------
config = Config()
model = GPT(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, betas=(0.9, 0.95), weight_decay=0.1)
schedule = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * step / steps))
)
first = 0
if (out / "ckpt.pt").exists():
    saved = torch.load(out / "ckpt.pt")
    first = saved["step"]
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    schedule.load_state_dict(saved["schedule"])
replica = DDP(model) if world > 1 else model

# -- training ----------------------------------------------------------------------------------------------------------
began = time.monotonic()
for step in range(first, steps):
    for index in range(accumulate):
        replica.require_backward_grad_sync = index == accumulate - 1  # what DDP's no_sync() sets
        x, y = get_batch("train", (step * world + rank) * accumulate + index)
        loss = loss_of(replica(x), y) / accumulate
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    if rank == 0 and (step + 1) % 10 == 0:
        print(f"step {step + 1}  loss {loss.item() * accumulate:.4f}  {time.monotonic() - began:.1f} s", flush=True)
    if rank == 0 and ((step + 1) % eval_every == 0 or step + 1 == steps):
        print(f"step {step + 1}  val {evaluate():.6f}", flush=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
        torch.save({"step": step + 1, **state}, out / "ckpt.tmp")
        os.replace(out / "ckpt.tmp", out / "ckpt.pt")  # a kill leaves the old one or the new one, whole

if world > 1:
    dist.destroy_process_group()
