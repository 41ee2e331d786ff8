"""plain.py with `argosy.Run` around its loop: it survives kills, resumes, and ends with the same bits.

    python examples/train.py [directory] [steps]
    argosy run -n 4 examples/train.py [directory] [steps]

`diff examples/plain.py examples/train.py` shows what changed: the run handles checkpoints, cursors and ranks. Kill any
rank while it trains. Takes 20 seconds. Expect an evaluation loss between 2 and 3.
"""

import hashlib
import math
import sys
from pathlib import Path

import numpy as np
import torch
from gpt import GPT, Config, loss_of
from torch.nn.parallel import DistributedDataParallel as DDP

import argosy
from argosy.data import Loader, Tokens

out = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/train")
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 200
batch, micro = 32, 8  # rows of a step over all ranks, rows that go through the model at once
peak_lr, warmup, grad_clip = 3e-3, 20, 1.0
eval_every = 25

run = argosy.Run(out, seed=0)

# -- data: a file of tokens (here the bytes themselves) for training, another for evaluation ---------------------------
documents = sorted(Path(__file__).parents[1].glob("docs/*.md"))
tokens = np.frombuffer(b"".join(path.read_bytes() for path in documents), np.uint8).astype(np.uint16)
out.mkdir(parents=True, exist_ok=True)
for name, part in (("train", tokens[: len(tokens) * 9 // 10]), ("val", tokens[len(tokens) * 9 // 10 :])):
    if not (out / f"{name}.bin").exists():
        part.tofile(out / f"{name}.{run.rank}")
        (out / f"{name}.{run.rank}").replace(out / f"{name}.bin")
config = Config()
train, val = (
    Loader(Tokens(out / f"{name}.bin", config.max_position_embeddings), batch=batch, micro=micro)
    for name in ("train", "val")
)
val.place(0, 1)  # every rank evaluates all of it


@torch.no_grad()
def evaluate() -> float:
    val.rewind()
    return torch.stack([loss_of(model(x), y) for x, y in val.batches()]).mean().item()


# -- model, optimizer, schedule ----------------------------------------------------------------------------------------
model = GPT(config)
replica = DDP(model) if run.size > 1 else model
optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, betas=(0.9, 0.95), weight_decay=0.1)
schedule = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * step / steps))
)
run.track(model=replica, optimizer=optimizer, schedule=schedule)

# -- training ----------------------------------------------------------------------------------------------------------
loss = torch.tensor(math.nan)
for step in run.steps(until=steps):
    with step:
        for x, y in step.batches(train):
            loss = loss_of(replica(x), y)
            (loss * step.scale).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        optimizer.step()
        schedule.step()
        run.log(loss=loss)
    if step.every(10) and run.rank == 0:
        print(f"step {step.number + 1}/{steps}  loss {loss.item():.4f}", flush=True)
    if step.every(eval_every):
        with run.aside("evaluation"):
            run.log(val=evaluate())

digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())).hexdigest()
if run.rank == 0:
    print(f"done  loss {loss.item():.4f}  weights {digest[:16]}", flush=True)
