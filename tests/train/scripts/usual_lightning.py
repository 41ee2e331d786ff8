"""Lightning as people use it: validation within epochs, best checkpoints, early stopping, TensorBoard, BatchNorm."""

import hashlib
import sys
from collections.abc import Iterable

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import argosy
from argosy.train.adapters.lightning import Surviving

out = sys.argv[1]
run = argosy.Run(out)


class Net(pl.LightningModule):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(16, width), nn.BatchNorm1d(width), nn.Dropout(0.1), nn.Linear(width, 1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]).squeeze(1), batch[1])
        self.log("loss", loss, prog_bar=True)
        self.last = loss.detach()
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("error", nn.functional.mse_loss(self.net(batch[0]).squeeze(1), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Rows(pl.LightningDataModule):
    def setup(self, stage: str) -> None:
        rows = torch.randn(88, 16, generator=torch.Generator().manual_seed(1))
        self.rows = TensorDataset(rows, rows.sum(1))

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        rows = torch.utils.data.Subset(self.rows, range(64))
        return DataLoader(rows, batch_size=4, shuffle=True, num_workers=1, persistent_workers=True)

    def val_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(torch.utils.data.Subset(self.rows, range(64, 88)), batch_size=4)


pl.seed_everything(7)
best = ModelCheckpoint(dirpath=f"{out}/best", monitor="error", save_top_k=2, save_last=True)
trainer = pl.Trainer(
    accelerator="cpu",
    devices=run.size,
    strategy=Surviving(run),
    accumulate_grad_batches=2,
    gradient_clip_val=0.5,
    max_epochs=3,
    val_check_interval=4,
    callbacks=[best, LearningRateMonitor(), EarlyStopping("error", patience=20)],
    logger=TensorBoardLogger(out, name="board"),
    log_every_n_steps=2,
    enable_progress_bar=False,
    enable_model_summary=False,
)
model = Net()
trainer.fit(model, datamodule=Rows())

if run.rank == 0:
    kept = torch.load(best.last_model_path or f"{out}/best/last.ckpt", weights_only=False)
    assert kept["global_step"] == 0 or kept["optimizer_states"][0]["state"], "no checkpoint of untrained weights"


def digest(tensors: Iterable[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in tensors)).hexdigest()[:16]


# Buffers of BatchNorm are rank 0's after a validation, if it lives then; rank 0 is the one that saves.
buffers = digest(model.buffers()) if run.rank == 0 else "-"
print(f"rank {run.rank}  loss {trainer.global_step}/{buffers}  weights {digest(model.parameters())}", flush=True)
