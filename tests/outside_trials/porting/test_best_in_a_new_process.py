"""`ckpt_path="best"` in a process that has not trained: the run's index says which checkpoint it is."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.callbacks import ModelCheckpoint
from trainwright.cli.main import main
from trainwright.core.errors import ConfigurationError
from trainwright.trainer.trainer import Trainer

SCORES = [3.0, 1.0, 2.0]


class Scored(RegressionTask):
    """Logs a given score at each validation, and trains so that every epoch's weights differ."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log this epoch's score."""
        self.log("score", torch.tensor(SCORES[min(self.current_epoch, 2)]))


def trainer_with(folder: Path, saver: ModelCheckpoint, **arguments: Any) -> Trainer:
    return quiet_trainer(default_root_dir=folder, callbacks=[saver], num_sanity_val_steps=0, **arguments)


def train(folder: Path, saver: ModelCheckpoint) -> str:
    trainer = trainer_with(folder, saver, max_epochs=3)
    trainer.fit(Scored(), regression_loader(4), regression_loader(1))
    return str(saver.best_model_path)


def weights_after(trainer: Trainer, stage: str) -> torch.Tensor:
    task = Scored()
    getattr(trainer, stage)(task, regression_loader(2), ckpt_path="best")
    return task.net[0].weight.detach()


@pytest.mark.parametrize("stage", ["validate", "test"])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_new_trainer_finds_the_best_of_the_run(tmp_path: Path, stage: str, mode: str) -> None:
    best = train(tmp_path, ModelCheckpoint(monitor="score", mode=mode, save_top_k=-1))
    fresh = trainer_with(tmp_path, ModelCheckpoint(monitor="score", mode=mode))
    assert weights_after(fresh, stage).equal(Scored.load_from_checkpoint(best).net[0].weight)


def test_without_a_monitor_the_newest_is_the_best(tmp_path: Path) -> None:
    best = train(tmp_path, ModelCheckpoint())
    assert weights_after(trainer_with(tmp_path, ModelCheckpoint()), "test").equal(
        Scored.load_from_checkpoint(best).net[0].weight
    )


def test_the_run_that_wrote_last_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path, ModelCheckpoint(monitor="score"))
    monkeypatch.setattr(f"{__name__}.SCORES", [7.0, 8.0, 9.0])
    second = train(tmp_path, ModelCheckpoint(monitor="score"))
    fresh = trainer_with(tmp_path, ModelCheckpoint(monitor="score"))
    assert weights_after(fresh, "test").equal(Scored.load_from_checkpoint(second).net[0].weight)


def test_a_folder_without_the_metric_is_an_error_that_names_both(tmp_path: Path) -> None:
    train(tmp_path, ModelCheckpoint(monitor="score"))
    fresh = trainer_with(tmp_path, ModelCheckpoint(monitor="other"))
    with pytest.raises(ConfigurationError, match=r"no checkpoint with the metric 'other' in .*checkpoints.*dirpath"):
        weights_after(fresh, "test")


def test_a_trainer_without_a_model_checkpoint_says_what_is_needed(tmp_path: Path) -> None:
    train(tmp_path, ModelCheckpoint(monitor="score"))
    fresh = quiet_trainer(default_root_dir=tmp_path)
    with pytest.raises(ConfigurationError, match=r"callbacks=\[ModelCheckpoint\(monitor=…\)\]"):
        weights_after(fresh, "test")


PROJECT = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from trainwright import DataModule, TaskModule


class Task(TaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.epochs_seen = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch, batch_idx):
        return -self.epochs_seen

    def validation_step(self, batch, batch_idx):
        self.log("distance", (self.epochs_seen - 2).abs())

    def test_step(self, batch, batch_idx):
        self.log("epochs_seen", self.epochs_seen)

    def predict_step(self, batch, batch_idx):
        return self.epochs_seen.repeat(len(batch[0]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Data(DataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.zeros(1)))

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader
"""

CONFIG = """
trainer:
  max_epochs: 4
  accelerator: cpu
  default_root_dir: runs
  logger: false
  enable_progress_bar: false
  enable_model_summary: false
  callbacks:
    - class_path: ModelCheckpoint
      init_args: {monitor: distance}
task: {class_path: best_project.Task}
data: {class_path: best_project.Data}
"""


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_the_commands_take_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stage: str
) -> None:
    import sys

    (tmp_path / "best_project.py").write_text(textwrap.dedent(PROJECT))
    (tmp_path / "config.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    try:
        assert main(["fit", "--config", "config.yaml"]) == 0
        assert main([stage, "--config", "config.yaml", "--ckpt_path", "best"]) == 0
    finally:
        sys.modules.pop("best_project", None)
    if stage == "predict":
        from safetensors.torch import load_file

        assert load_file(tmp_path / "runs/predictions.safetensors")["predictions"].tolist() == [2.0]
    elif stage == "test":
        assert capsys.readouterr().out.split()[-2:] == ["epochs_seen", "2"]
