"""Two optimizers with manual optimization under Lightning: a lost rank restarts all from memory."""

import hashlib
import sys

import lightning.pytorch as pl
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

import argosy
from argosy.train.adapters.lightning import Surviving

run = argosy.Run(sys.argv[1])


class Model(BoringModel):
    automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = torch.nn.functional.dropout(self.layer(batch), 0.1).square().mean()
        first, second = self.optimizers()
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        other = torch.nn.functional.dropout(self.layer(batch), 0.1).add(1).square().mean()
        second.zero_grad()
        self.manual_backward(other)
        second.step()
        self.lr_schedulers().step()
        self.log("loss", loss, sync_dist=True)
        self.last = loss.detach()

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(RandomDataset(32, 64), batch_size=4, shuffle=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer, torch.optim.SGD(self.parameters(), lr=0.01)], [
            torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
        ]


pl.seed_everything(7)
trainer = pl.Trainer(
    accelerator="cpu",
    devices=run.size,
    strategy=Surviving(run),
    max_epochs=2,
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
