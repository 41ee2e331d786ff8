"""FSDP2 and clipped gradients under Lightning: a lost rank restarts all from memory."""

import hashlib
import sys

import lightning.pytorch as pl
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import argosy
from argosy.train.adapters.lightning import SurvivingSharded

run = argosy.Run(sys.argv[1])


class Model(BoringModel):
    def configure_model(self) -> None:
        fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])

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
    strategy=SurvivingSharded(run, data_parallel_size=2, tensor_parallel_size=1),
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

digest = hashlib.sha256(
    b"".join(each.full_tensor().detach().numpy().tobytes() for each in model.state_dict().values())
).hexdigest()
print(f"rank {run.rank}  loss {model.last:.6f}  weights {digest[:16]}", flush=True)
