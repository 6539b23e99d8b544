"""The first program of many: an autoencoder, trained, tested, predicted with, and loaded as a plain module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import trainwright as L
from tests.ported.data import digits


class LitAutoEncoder(L.TaskModule):
    """Two perceptrons that are given from outside."""

    def __init__(self, encoder: nn.Module, decoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the codes of images."""
        return self.encoder(images.view(images.size(0), -1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Log and return how much is lost."""
        return self.shared_step(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log it."""
        self.shared_step(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Log it."""
        self.shared_step(batch, "test")

    def shared_step(self, batch: Any, stage: str) -> torch.Tensor:
        """Log and return the squared error."""
        x, _ = batch
        x = x.view(x.size(0), -1)
        loss = F.mse_loss(self.decoder(self.encoder(x)), x)
        self.log(f"{stage}_loss", loss)
        return loss

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
        """Return codes."""
        return self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=5e-3)


def autoencoder() -> LitAutoEncoder:
    """Build one with six numbers as code."""
    L.seed_everything(8)
    encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 6))
    return LitAutoEncoder(encoder, nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64)))


def test_it_trains_tests_predicts_and_its_encoder_is_used_elsewhere(tmp_path: Path) -> None:
    loader = DataLoader(digits(), batch_size=64, shuffle=True)
    val, test = DataLoader(digits(train=False), batch_size=64), DataLoader(digits(train=False), batch_size=64)
    trainer = L.Trainer(
        max_epochs=12, default_root_dir=tmp_path, accelerator="cpu", devices=1, limit_train_batches=100,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model = autoencoder()
    trainer.fit(model, loader, val)
    (results,) = trainer.test(dataloaders=test)
    assert results["test_loss"] < 0.04  # the mean image alone leaves 0.075
    codes = trainer.predict(dataloaders=test)
    assert torch.cat(codes).shape == (397, 6)

    blank = autoencoder()
    loaded = LitAutoEncoder.load_from_checkpoint(
        trainer.checkpoint_callback.best_model_path, encoder=blank.encoder, decoder=blank.decoder
    )
    loaded.eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(digits(train=False).tensors[0]), torch.cat(codes))


def test_it_continues_where_it_was_stopped(tmp_path: Path) -> None:
    def run(folder: Path, epochs: int, ckpt_path: str | None = None) -> dict[str, torch.Tensor]:
        model = autoencoder()
        trainer = L.Trainer(
            max_epochs=epochs, default_root_dir=folder, accelerator="cpu", devices=1, logger=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(model, DataLoader(digits(), batch_size=64, shuffle=True), ckpt_path=ckpt_path)
        return model.state_dict()

    expected = run(tmp_path / "uninterrupted", 2)
    run(tmp_path / "stopped", 1)
    torch.testing.assert_close(run(tmp_path / "stopped", 2, "last"), expected, rtol=0, atol=0)
