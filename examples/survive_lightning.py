"""A Lightning Trainer that survives the kill of any rank, and ends with the same bits.

    argosy run -n 2 examples/survive_lightning.py [directory]

Three lines make it survive: they are marked. Takes 10 seconds. Expect "loss" and "weights", equal in every run.
"""

import hashlib
import sys

import lightning.pytorch as pl
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

import argosy
from argosy.train.adapters.lightning import Surviving  # 1

out = sys.argv[1] if len(sys.argv) > 1 else "runs/survive_lightning"
run = argosy.Run(out)  # 2


class Model(BoringModel):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = torch.nn.functional.dropout(self.layer(batch), 0.1).square().mean()
        self.log("loss", loss, sync_dist=True)
        self.last = loss.detach()
        return loss

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(RandomDataset(32, 64), batch_size=4, shuffle=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)]


pl.seed_everything(7)
trainer = pl.Trainer(
    accelerator="cpu",
    devices=run.size,
    strategy=Surviving(run),  # 3; "ddp" before
    accumulate_grad_batches=2,
    gradient_clip_val=0.1,
    max_epochs=4,
    limit_val_batches=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
model = Model()
trainer.fit(model)

digest = hashlib.sha256(b"".join(each.numpy().tobytes() for each in model.state_dict().values())).hexdigest()
print(f"rank {run.rank}  loss {model.last:.6f}  weights {digest[:16]}", flush=True)
