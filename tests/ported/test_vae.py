"""A variational autoencoder: steps draw random numbers, losses are logged in a dict, samples go to TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import trainwright as L
from tests.ported.data import digits
from trainwright.callbacks import LearningRateMonitor, ModelCheckpoint
from trainwright.loggers import TensorBoardLogger


class VAE(L.TaskModule):
    """Two perceptrons around four normally distributed numbers."""

    def __init__(self, latent_dim: int = 4, lr: float = 3e-3, kl_coeff: float = 1.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU())
        self.fc_mu, self.fc_var = nn.Linear(64, latent_dim), nn.Linear(64, latent_dim)
        self.decoder = nn.Sequential(nn.Linear(latent_dim, 64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (logits of the pixels, shape (batch, 64); the divergence from the prior, shape (batch,))."""
        hidden = self.encoder(images)
        mean, log_variance = self.fc_mu(hidden), self.fc_var(hidden)
        divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).sum(dim=1)
        return self.decoder(mean + torch.randn_like(mean) * (0.5 * log_variance).exp()), divergence

    def step(self, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the negative evidence bound in nats for an image, and its parts to be logged."""
        images, _ = batch
        logits, divergence = self(images)
        reconstruction = F.binary_cross_entropy_with_logits(logits, images.flatten(1), reduction="none").sum(dim=1)
        loss = (reconstruction + self.hparams.kl_coeff * divergence).mean()
        return loss, {"recon_loss": reconstruction.mean(), "kl": divergence.mean(), "loss": loss}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Log the parts by step and by epoch."""
        loss, logs = self.step(batch)
        self.log_dict({f"train_{name}": value for name, value in logs.items()}, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the parts."""
        self.log_dict({f"val_{name}": value for name, value in self.step(batch)[1].items()})

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return where the images lie."""
        return self.fc_mu(self.encoder(batch[0]))

    def on_validation_epoch_end(self) -> None:
        """Show a sample."""
        if self.logger:
            sample = self.decoder(torch.zeros(1, self.hparams.latent_dim, device=self.device)).sigmoid()
            self.logger.experiment.add_image("sample", sample.view(1, 8, 8), global_step=self.global_step)

    def configure_optimizers(self) -> Any:
        """Return Adam and a schedule by plateau."""
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def train(folder: Path, epochs: int, ckpt_path: str | None = None, logger: bool = False) -> tuple[L.Trainer, VAE]:
    """Train and return trainer and model."""
    L.seed_everything(5)
    model = VAE()
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_epochs=epochs, default_root_dir=folder,
        logger=TensorBoardLogger(folder, name="vae") if logger else False,
        callbacks=[ModelCheckpoint(monitor="val_loss", save_last=True), *[LearningRateMonitor()] * logger],
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    loaders = DataLoader(digits(), batch_size=50, shuffle=True), DataLoader(digits(train=False), batch_size=100)
    trainer.fit(model, *loaders, ckpt_path=ckpt_path)
    return trainer, model


@pytest.mark.slow
@pytest.mark.exhaustive
def test_it_learns_to_compress_digits(tmp_path: Path) -> None:
    trainer, model = train(tmp_path, 25, logger=True)
    metrics = trainer.callback_metrics
    assert metrics["val_loss"] < 29
    assert metrics["val_kl"] > 2  # the code is used
    assert metrics["val_loss"] == pytest.approx(metrics["val_recon_loss"] + metrics["val_kl"], rel=1e-5)
    assert {"train_loss_step", "train_loss_epoch", "train_kl_epoch"} <= set(metrics)
    codes = torch.cat(trainer.predict(model, DataLoader(digits(train=False), batch_size=100)))
    assert codes.shape == (397, 4)


def test_it_continues_where_it_was_stopped(tmp_path: Path) -> None:
    uninterrupted, expected = train(tmp_path / "uninterrupted", 4)
    train(tmp_path / "stopped", 2)
    resumed, model = train(tmp_path / "stopped", 4, ckpt_path="last")
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=0)
    assert dict(resumed.callback_metrics) == dict(uninterrupted.callback_metrics)
