"""Transfer learning: a backbone from another task's checkpoint, frozen at first, unfrozen by a callback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

import trainwright as L
from tests.ported.data import digits
from trainwright.callbacks import EarlyStopping, ModelCheckpoint


class Classifier(L.TaskModule):
    """A convolutional backbone with batch normalization, and a linear head."""

    def __init__(self, num_classes: int = 5, lr: float = 5e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(128, num_classes)
        self.accuracy = MulticlassAccuracy(num_classes, average="micro")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return self.head(self.backbone(images))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the cross-entropy."""
        return F.cross_entropy(self(batch[0]), batch[1] % 5)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the accuracy as a metric object."""
        self.accuracy(self(batch[0]), batch[1] % 5)
        self.log("val_acc", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> Any:
        """Return Adam over what is to be trained."""
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=self.hparams.lr)


class FreezeUnfreeze(L.Callback):
    """Freeze the backbone; from an epoch on, train it as well, with a smaller learning rate."""

    def __init__(self, unfreeze_at_epoch: int, factor: float = 0.1) -> None:
        self.unfreeze_at_epoch, self.factor = unfreeze_at_epoch, factor
        self.trained: list[int] = []

    def on_fit_start(self, trainer: L.Trainer, task: L.TaskModule) -> None:
        task.backbone.requires_grad_(False)

    def on_train_epoch_start(self, trainer: L.Trainer, task: L.TaskModule) -> None:
        if trainer.current_epoch == self.unfreeze_at_epoch:
            task.backbone.requires_grad_(True).train()
            optimizer = trainer.optimizers[0]
            lr = optimizer.param_groups[0]["lr"] * self.factor
            optimizer.add_param_group({"params": list(task.backbone.parameters()), "lr": lr})
        if trainer.current_epoch < self.unfreeze_at_epoch:
            task.backbone.eval()  # its running means stay
        self.trained.append(sum(p.numel() for p in task.parameters() if p.requires_grad))


class FineTuned(Classifier):
    """Of which the optimizer sees the head alone when it is made."""

    def configure_optimizers(self) -> Any:
        """Return Adam over the head."""
        return torch.optim.Adam(self.head.parameters(), lr=self.hparams.lr)


def loaders(classes: range, limit: int = 1400) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return a training loader of at most `limit` images, and a validation loader."""
    few = torch.utils.data.Subset(digits(classes), range(min(limit, len(digits(classes)))))
    return DataLoader(few, batch_size=32, shuffle=True), DataLoader(digits(classes, train=False), batch_size=64)


def trainer_for(folder: Path, **settings: Any) -> L.Trainer:
    """Return one without bars."""
    return L.Trainer(
        accelerator="cpu", devices=1, default_root_dir=folder, logger=False, enable_progress_bar=False,
        enable_model_summary=False, **settings,
    )  # fmt: skip


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train on the digits below 5 and return the best checkpoint."""
    L.seed_everything(0)
    best = ModelCheckpoint(monitor="val_acc", mode="max")
    stop = EarlyStopping("val_acc", mode="max", stopping_threshold=0.97)
    trainer = trainer_for(tmp_path_factory.mktemp("pretrained"), max_epochs=10, callbacks=[best, stop])
    trainer.fit(Classifier(), *loaders(range(5)))
    assert best.best_model_score >= 0.97
    return Path(best.best_model_path)


def fine_tune(folder: Path, pretrained: Path, epochs: int, ckpt_path: str | None = None) -> Any:
    """Train on two hundred images of the digits from 5 on."""
    L.seed_everything(1)
    model = FineTuned()
    model.backbone.load_state_dict(Classifier.load_from_checkpoint(pretrained).backbone.state_dict())
    callback = FreezeUnfreeze(unfreeze_at_epoch=8)
    saver = ModelCheckpoint(save_last=True)
    trainer = trainer_for(folder, max_epochs=epochs, callbacks=[callback, saver], log_every_n_steps=1)
    trainer.fit(model, *loaders(range(5, 10), limit=200), ckpt_path=ckpt_path)
    return trainer, model, callback


@pytest.mark.slow
def test_a_frozen_backbone_stays_and_an_unfrozen_one_learns(tmp_path: Path, pretrained: Path) -> None:
    before = Classifier.load_from_checkpoint(pretrained).backbone.state_dict()
    _, frozen, callback = fine_tune(tmp_path / "frozen", pretrained, 8)
    torch.testing.assert_close(frozen.backbone.state_dict(), before, rtol=0, atol=0)
    assert set(callback.trained) == {128 * 5 + 5}

    trainer, model, callback = fine_tune(tmp_path / "both", pretrained, 16)
    assert callback.trained[-1] == sum(p.numel() for p in model.parameters())
    assert not torch.equal(model.backbone[0].weight, before["0.weight"])
    assert trainer.callback_metrics["val_acc"] >= 0.85


def test_it_continues_over_the_epoch_in_which_the_backbone_is_unfrozen(tmp_path: Path, pretrained: Path) -> None:
    _, expected, _ = fine_tune(tmp_path / "uninterrupted", pretrained, 10)
    fine_tune(tmp_path / "stopped", pretrained, 8)
    _, model, _ = fine_tune(tmp_path / "stopped", pretrained, 10, ckpt_path="last")
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=0)
