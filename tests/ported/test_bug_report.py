"""The smallest program, as it is put into bug reports, with gradient accumulation and every stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from trainwright import TaskModule, Trainer, seed_everything


class RandomDataset(Dataset[torch.Tensor]):
    """Normally distributed rows."""

    def __init__(self, size: int, length: int) -> None:
        self.data = torch.randn(length, size)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.data[index]

    def __len__(self) -> int:
        return len(self.data)


class BoringModel(TaskModule):
    """One layer whose output is to be zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return its output."""
        return self.layer(x)

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the mean square of the output."""
        return self(batch).square().mean()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> dict[str, Any]:
        """Return a dict with a loss."""
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return {"loss": loss}

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        """Log it."""
        self.log("valid_loss", self.loss(batch))

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        """Log it."""
        self.log("test_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        """Return SGD and a schedule."""
        optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)]


def run(folder: Path, max_epochs: int, ckpt_path: str | None = None) -> tuple[Trainer, BoringModel, Any]:
    """Do what `run()` of a bug report does."""
    seed_everything(1)
    train_data = DataLoader(RandomDataset(32, 64), batch_size=2)
    val_data = DataLoader(RandomDataset(32, 64), batch_size=2)
    test_data = DataLoader(RandomDataset(32, 64), batch_size=2)
    model = BoringModel()
    trainer = Trainer(
        accelerator="cpu", devices=1, default_root_dir=folder, limit_train_batches=31, limit_val_batches=1,
        limit_test_batches=4, num_sanity_val_steps=0, max_epochs=max_epochs, accumulate_grad_batches=4,
        enable_model_summary=False, enable_progress_bar=False, logger=False,
    )  # fmt: skip
    trainer.fit(model, train_dataloaders=train_data, val_dataloaders=val_data, ckpt_path=ckpt_path)
    return trainer, model, trainer.test(model, dataloaders=test_data)


def test_every_stage_runs_and_the_layer_becomes_zero(tmp_path: Path) -> None:
    trainer, model, results = run(tmp_path, 10)
    assert trainer.global_step == 80  # 31 batches: seven groups of four and one of three
    assert results[0]["test_loss"] < 0.15  # 0.33 before training
    assert model.layer.weight.abs().mean() < 0.05


def test_it_continues_where_it_was_stopped(tmp_path: Path) -> None:
    _, expected, (test_loss,) = run(tmp_path / "uninterrupted", 3)
    run(tmp_path / "stopped", 2)
    _, model, (again,) = run(tmp_path / "stopped", 3, "last")
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=0)
    assert again == test_loss
