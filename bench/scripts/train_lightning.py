"""The same training under Lightning, for ever.   train_lightning.py HOME SAVE_EVERY

Started by torchrun, which starts it again; it saves every so many steps and goes on from the last checkpoint.
"""

import itertools
import logging
import sys
import warnings

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from stepping import Steps, loss_of_rows, model_and_seed, optimizer_of
from torch import Tensor

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
home, every = sys.argv[1], int(sys.argv[2])


class Training(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = model_and_seed()
        self.record: Steps | None = None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self.model)

    def on_train_start(self) -> None:
        self.record = Steps(home, self.global_rank)

    def on_train_batch_start(self, *_: object) -> None:
        assert self.record is not None
        self.record.begin()

    def training_step(self, *_: object) -> Tensor:
        return loss_of_rows(self.model)

    def on_train_batch_end(self, *_: object) -> None:
        assert self.record is not None
        self.record.counts(self.global_step)


quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = Trainer(
    accelerator="cpu",
    devices=4,
    strategy="ddp",
    max_epochs=-1,
    max_steps=-1,
    use_distributed_sampler=False,
    callbacks=[ModelCheckpoint(dirpath=home, every_n_train_steps=every, save_top_k=1, save_last="link")],
    **quiet,
)
trainer.fit(Training(), train_dataloaders=itertools.repeat(0), ckpt_path="last")
