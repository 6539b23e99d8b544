"""Calls that code for Lightning makes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.tasks import RegressionTask, regression_loader
from tests.trainer.runs import MemoryLogger, fitted, quiet_trainer
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.core.errors import TrainwrightWarning
from trainwright.core.task import TaskModule


class _Base(TaskModule):
    pass


class _Own(_Base):
    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        return None

    def configure_optimizers(self) -> None:
        return None


class _Calling(RegressionTask):
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.validation_step_of_base = TaskModule.validation_step(self, batch, batch_idx, dataloader_idx)
        return super().predict_step(batch, batch_idx, dataloader_idx)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("total", 1.0, reduce_fx="SUM", on_epoch=True, on_step=False)
        return self.loss(batch)

    def on_train_epoch_end(self) -> None:
        self.on_epoch_end()

    def on_epoch_end(self) -> None:
        self.ended = True


def _base_of_a_sub_class(folder: Path) -> None:
    with pytest.warns(TrainwrightWarning):
        trainer = fitted(_Own(), regression_loader(2), max_epochs=1)
    trainer.save_checkpoint(folder / "saved")
    assert type(_Base.load_from_checkpoint(folder / "saved")) is _Base


def _default_steps_with_a_loader_index(folder: Path) -> None:
    assert len(quiet_trainer().predict(_Calling(), regression_loader(2)) or ()) == 2


def _a_reduction_in_capitals_and_an_own_method_with_the_name_of_a_removed_hook(folder: Path) -> None:
    task = _Calling()
    assert fitted(task, regression_loader(2), max_epochs=1).callback_metrics["total"] == 2.0
    assert task.ended


def _metrics_without_a_step(folder: Path) -> None:
    logger = MemoryLogger()
    logger.log_metrics({"a": 1.0}, 3)
    logger.log_metrics({"a": 2.0})  # type: ignore[call-arg]  # as in Lightning
    logger.log_metrics({"a": 3.0}, step=None)  # type: ignore[arg-type]  # as in Lightning
    assert logger.values("a") == {3: 1.0, 4: 2.0, 5: 3.0}


def _a_name_with_a_metric_that_is_never_logged(folder: Path) -> None:
    saver = ModelCheckpoint(dirpath=folder, filename="{epoch}-{never:.2f}", save_top_k=-1)
    with pytest.warns(TrainwrightWarning, match=r"'never'.*Its value in names is nan") as warned:
        fitted(RegressionTask(), regression_loader(2), max_epochs=2, callbacks=saver)
    assert len(warned) == 1
    assert sorted(path.name for path in folder.glob("epoch*")) == ["epoch=0-never=nan", "epoch=1-never=nan"]


@pytest.mark.parametrize(
    "check",
    [
        _base_of_a_sub_class,
        _default_steps_with_a_loader_index,
        _a_reduction_in_capitals_and_an_own_method_with_the_name_of_a_removed_hook,
        _metrics_without_a_step,
        _a_name_with_a_metric_that_is_never_logged,
    ],
)
def test_code_for_lightning_may_use(check: Callable[[Path], None], tmp_path: Path) -> None:
    check(tmp_path)
