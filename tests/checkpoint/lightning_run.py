"""Started by a test: trains with Lightning and saves a checkpoint where the argument says."""

from __future__ import annotations

import sys
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


class Module(lightning.LightningModule):
    """A model with BatchNorm, whose buffers lie between its parameters."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.first = torch.nn.Linear(3, width)
        self.norm = torch.nn.BatchNorm1d(width)
        self.head = torch.nn.Linear(width, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the loss."""
        return self.head(self.norm(self.first(batch[0]))).pow(2).mean()

    def configure_optimizers(self) -> Any:
        """Return an optimizer and its schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


if __name__ == "__main__":
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(Module(), DataLoader(TensorDataset(torch.randn(8, 3)), batch_size=2))
    trainer.save_checkpoint(sys.argv[1])
