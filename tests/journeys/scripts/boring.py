"""Lightning's BoringModel with DDP on CPU ranks; rank 0 prints the last loss and what it was given."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader


class Model(BoringModel):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.layer(batch).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(RandomDataset(32, 64), batch_size=4)


if __name__ == "__main__":
    pl.seed_everything(7)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model())
    kind = type(trainer.strategy.cluster_environment).__name__
    if trainer.is_global_zero:
        print("RESULT", f"{trainer.callback_metrics['loss'].item():.6f}", trainer.world_size, kind, flush=True)
