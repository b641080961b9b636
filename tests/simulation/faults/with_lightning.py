"""A training with Lightning that continues from its last checkpoint, for test_resume_of_libraries.py.

torchrun ... with_lightning.py FOLDER
"""

from __future__ import annotations

import sys

import torch
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Dropout(), nn.Linear(16, 1))

    def on_train_epoch_start(self) -> None:
        seed_everything(100 * self.current_epoch + self.global_rank, verbose=False)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        x, target = batch
        loss = (self.layers(x) - target).square().mean()
        total = self.all_gather(loss.detach()).sum().item()
        if self.global_rank == 0:
            print(f"step {self.global_step + 1}: {total!r}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main() -> None:
    folder = sys.argv[1]
    seed_everything(0)
    x = torch.randn(64, 8)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
    saved = ModelCheckpoint(dirpath=folder, save_last=True)
    trainer = Trainer(
        accelerator="gpu",
        devices=2,
        strategy="ddp",
        max_epochs=4,
        callbacks=[saved],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), loader, ckpt_path="last")


main()
