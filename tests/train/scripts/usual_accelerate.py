"""A loop of accelerate as people write it: trackers, evaluations, saves after each epoch, BatchNorm, workers."""

import hashlib
import sys
from collections.abc import Iterable

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import argosy
from argosy.train.adapters.accelerate import surviving

out = sys.argv[1]
run = argosy.Run(out)
accelerator = surviving(Accelerator, run)(
    cpu=True, gradient_accumulation_steps=2, log_with="tensorboard", project_dir=out
)
accelerator.init_trackers("board")
set_seed(7)
rows = torch.randn(88, 16)
data = DataLoader(TensorDataset(rows[:56], rows[:56].sum(1)), batch_size=4, shuffle=True, num_workers=1)
judged = DataLoader(TensorDataset(rows[56:], rows[56:].sum(1)), batch_size=8)
model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=80)
model, optimizer, data, judged, schedule = accelerator.prepare(model, optimizer, data, judged, schedule)

loss = torch.zeros(())
for epoch in range(3):
    model.train()
    for batch, sums in data:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(batch).squeeze(1), sums)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    model.eval()
    errors = []
    for batch, sums in judged:
        with torch.no_grad():
            found = model(batch).squeeze(1)
        errors.append(accelerator.gather_for_metrics((found - sums).square()))
    accelerator.log({"error": float(torch.cat(errors).mean())}, step=epoch)
    accelerator.save_state(f"{out}/state")
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), f"{out}/model.pt")
accelerator.end_training()


def digest(tensors: Iterable[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in tensors)).hexdigest()[:16]


# Variables of the script, such as `loss`, are not those of an undisturbed run; what is saved is.
saved = digest(torch.load(f"{out}/model.pt").values()) if run.rank == 0 else "-"
print(f"rank {run.rank}  loss {saved}  weights {digest(model.parameters())}", flush=True)
