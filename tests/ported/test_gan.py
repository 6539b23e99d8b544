"""A GAN: two optimizers in turn, by manual optimization."""

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
from trainwright.callbacks import ModelCheckpoint

LATENT = 16


class GAN(L.TaskModule):
    """A generator of 8×8 images and a discriminator, each a small perceptron."""

    def __init__(self, lr: float = 2e-3, b1: float = 0.5, b2: float = 0.999) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(LATENT, 128), nn.ReLU(), nn.Linear(128, 64), nn.Sigmoid())
        self.discriminator = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
        self.register_buffer("validation_z", torch.randn(256, LATENT))

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        """Return images, shape (batch, 1, 8, 8)."""
        return self.generator(z).view(-1, 1, 8, 8)

    def judged(self, images: torch.Tensor, real: bool) -> torch.Tensor:
        """Return the loss of a discriminator that ought to answer `real`."""
        answers = self.discriminator(images)
        return F.binary_cross_entropy_with_logits(answers, torch.full_like(answers, float(real)))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Train the generator, then the discriminator."""
        images, _ = batch
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.randn(images.shape[0], LATENT).type_as(images)

        self.toggle_optimizer(optimizer_g)
        assert not any(p.requires_grad for p in self.discriminator.parameters())
        g_loss = self.judged(self(z), real=True)
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        assert not any(p.requires_grad for p in self.generator.parameters())
        d_loss = (self.judged(images, real=True) + self.judged(self(z).detach(), real=False)) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

    def on_train_epoch_end(self) -> None:
        """Advance both schedules, and log how far the mean image of the generator is from that of the data."""
        for scheduler in self.lr_schedulers():
            scheduler.step()
        with torch.no_grad():
            generated = self(self.validation_z)
        real = digits().tensors[0].to(self.device)
        self.log("distance", (generated.mean(dim=0) - real.mean(dim=0)).abs().mean())
        if self.logger is not None:
            grid = generated[:4].reshape(1, -1, 8)
            self.logger.experiment.add_image("generated_images", grid, self.current_epoch)

    def configure_optimizers(self) -> Any:
        """Return an Adam for each, and a schedule for each."""
        betas = (self.hparams.b1, self.hparams.b2)
        optimizers = [
            torch.optim.Adam(self.generator.parameters(), lr=self.hparams.lr, betas=betas),
            torch.optim.Adam(self.discriminator.parameters(), lr=self.hparams.lr, betas=betas),
        ]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(each, 0.97) for each in optimizers]


def train(folder: Path, epochs: int, ckpt_path: str | None = None, logger: Any = False) -> tuple[L.Trainer, GAN]:
    """Train and return trainer and model."""
    L.seed_everything(3)
    model = GAN()
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_epochs=epochs, default_root_dir=folder, logger=logger,
        callbacks=[ModelCheckpoint(save_last=True)], enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(digits(), batch_size=64, shuffle=True), ckpt_path=ckpt_path)
    return trainer, model


@pytest.mark.slow
@pytest.mark.exhaustive
def test_it_learns_what_digits_look_like_on_the_average(tmp_path: Path) -> None:
    trainer, model = train(tmp_path, 20, logger=True)
    assert trainer.callback_metrics["distance"] < 0.08
    assert 0.2 < trainer.callback_metrics["d_loss"].item() < 1.0
    variance = model(torch.randn(256, LATENT)).var(dim=0).mean().item()
    assert variance > 0.03  # not one image for all


def test_it_continues_where_it_was_stopped(tmp_path: Path) -> None:
    uninterrupted, expected = train(tmp_path / "uninterrupted", 4)
    train(tmp_path / "stopped", 2)
    resumed, model = train(tmp_path / "stopped", 4, ckpt_path="last")
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=0)
    assert resumed.global_step == uninterrupted.global_step
    assert dict(resumed.callback_metrics) == dict(uninterrupted.callback_metrics)
