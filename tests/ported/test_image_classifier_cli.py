"""An image classifier whose script is a command line: `fit`, `test` and `predict` with a configuration file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import Accuracy

from tests.ported.data import digits
from trainwright import CLI, DataModule, TaskModule


class ImageClassifier(TaskModule):
    """A convolutional network."""

    def __init__(self, channels: int = 8, lr: float = 0.01, gamma: float = 0.9, num_classes: int = 10) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(16 * channels, num_classes),
        )  # fmt: skip
        self.val_acc = Accuracy(task="multiclass", num_classes=num_classes)
        self.test_acc = Accuracy(task="multiclass", num_classes=num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return self.net(images)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the cross-entropy."""
        return F.cross_entropy(self(batch[0]), batch[1].long())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the accuracy."""
        self.log("val_acc", self.val_acc(self(batch[0]), batch[1]), batch_size=len(batch[1]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Log loss and accuracy."""
        logits = self(batch[0])
        self.test_acc(logits, batch[1])
        self.log("test_acc", self.test_acc)
        self.log("test_loss", F.cross_entropy(logits, batch[1].long()))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return classes."""
        return self(batch[0]).argmax(dim=1)

    def configure_optimizers(self) -> Any:
        """Return Adam and a schedule by epochs."""
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=self.hparams.gamma)]


class Digits(DataModule):
    """Digits in batches."""

    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        """Return the training images."""
        return DataLoader(digits(), batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        """Return the others."""
        return DataLoader(digits(train=False), batch_size=self.hparams.batch_size)

    test_dataloader = predict_dataloader = val_dataloader


QUIET = [
    "--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false", "--trainer.logger=false",
]  # fmt: skip


def main(*arguments: str) -> CLI:
    """Do what the script does."""
    return CLI(ImageClassifier, Digits, seed_everything_default=1337, args=[*arguments, *QUIET])


def written(folder: Path, max_epochs: int) -> str:
    """Write a configuration and return its path."""
    saver = {
        "class_path": "trainwright.callbacks.ModelCheckpoint",
        "init_args": {"monitor": "val_acc", "mode": "max", "save_last": True},
    }
    folder.mkdir(exist_ok=True)
    path = folder / f"{max_epochs}-epochs.yaml"
    trainer = {"max_epochs": max_epochs, "default_root_dir": str(folder), "callbacks": [saver]}
    path.write_text(yaml.safe_dump({"trainer": trainer, "model": {"channels": 16}, "data": {"batch_size": 50}}))
    return str(path)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_the_script_fits_tests_and_predicts(tmp_path: Path) -> None:
    cli = main("fit", "--config", written(tmp_path, 6))
    assert cli.model.hparams.channels == 16
    (results,) = cli.trainer.test(ckpt_path="best", datamodule=cli.datamodule)
    assert results["test_acc"] >= 0.88
    assert results["test_acc"] == pytest.approx(cli.trainer.checkpoint_callback.best_model_score)

    best = cli.trainer.checkpoint_callback.best_model_path
    tested = main("test", "--config", "config.yaml", "--ckpt_path", best)
    assert tested.trainer.callback_metrics["test_acc"] == results["test_acc"]
    predictions = tested.trainer.predict(tested.model, tested.datamodule)
    right = torch.cat(predictions) == digits(train=False).tensors[1]
    assert right.float().mean().item() == pytest.approx(results["test_acc"])


@pytest.mark.slow
def test_the_script_continues_where_it_was_stopped(tmp_path: Path) -> None:
    expected = main("fit", "--config", written(tmp_path / "uninterrupted", 3)).model.state_dict()
    main("fit", "--config", written(tmp_path / "stopped", 2))
    resumed = main("fit", "--config", written(tmp_path / "stopped", 3), "--ckpt_path=last")
    torch.testing.assert_close(resumed.model.state_dict(), expected, rtol=0, atol=0)
