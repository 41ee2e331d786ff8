"""Lightning that resumes from its own checkpoints; ranks are killed where they are told to.   DIRECTORY [DEATH]..."""

import hashlib
import os
import signal
import sys

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

out, *deaths = sys.argv[1:]


def die(step: int) -> None:
    """As the command line says: RANK.GENERATION:STEP."""
    if f"{os.environ['RANK']}.{os.environ['TORCHELASTIC_RESTART_COUNT']}:{step}" in deaths:
        os.kill(os.getpid(), signal.SIGKILL)


class Model(BoringModel):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        die(self.trainer.global_step)
        return self.layer(batch).square().mean()

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(RandomDataset(32, 64), batch_size=8, shuffle=True)


pl.seed_everything(7)
trainer = pl.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    max_epochs=5,
    limit_val_batches=0,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[ModelCheckpoint(dirpath=out, save_last=True)],
)
model = Model()
last = os.path.join(out, "last.ckpt")
trainer.fit(model, ckpt_path=last if os.path.exists(last) else None)
digest = hashlib.sha256(b"".join(each.numpy().tobytes() for each in model.state_dict().values())).hexdigest()
if trainer.is_global_zero:
    print("RESULT", trainer.global_step, digest[:16], flush=True)
