"""A loop of Hugging Face accelerate that survives the kill of any rank, and ends with the same bits.

    argosy run -n 2 examples/survive_accelerate.py [directory]

Three lines make it survive: they are marked. Takes 10 seconds. Expect "loss" and "weights", equal in every run.
"""

import hashlib
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import argosy
from argosy.train.adapters.accelerate import surviving  # 1

out = sys.argv[1] if len(sys.argv) > 1 else "runs/survive_accelerate"
run = argosy.Run(out)  # 2
accelerator = surviving(Accelerator, run)(cpu=True, gradient_accumulation_steps=2)  # 3
set_seed(7)
rows = torch.randn(200, 16)
data = DataLoader(TensorDataset(rows, rows.sum(1)), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.9)
model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)

loss = torch.zeros(())
for _ in range(4):
    for batch, sums in data:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(batch).squeeze(1), sums)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
accelerator.end_training()

digest = hashlib.sha256(b"".join(each.numpy().tobytes() for each in model.state_dict().values())).hexdigest()
print(f"rank {run.rank}  loss {loss.item():.6f}  weights {digest[:16]}", flush=True)
