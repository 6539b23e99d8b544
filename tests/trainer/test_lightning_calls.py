"""Calls that code for Lightning makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.tasks import RegressionTask, regression_loader
from tests.trainer.runs import fitted, quiet_trainer
from trainwright import ModelCheckpoint
from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.core.task import TaskModule


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


def test_default_steps_take_a_loader_index() -> None:
    assert len(quiet_trainer().predict(_Calling(), regression_loader(2)) or ()) == 2


def test_a_reduction_in_capitals_and_an_own_method_with_the_name_of_a_removed_hook_are_accepted() -> None:
    task = _Calling()
    assert fitted(task, regression_loader(2), max_epochs=1).callback_metrics["total"] == 2.0
    assert task.ended


def test_a_name_with_a_metric_that_is_never_logged_says_nan(tmp_path: Path) -> None:
    saver = ModelCheckpoint(dirpath=tmp_path, filename="{epoch}-{never:.2f}")
    with pytest.warns(TrainwrightWarning, match=r"'never'.*Its value in names is nan"):
        fitted(RegressionTask(), regression_loader(2), max_epochs=1, callbacks=saver)
    assert (tmp_path / "epoch=0-never=nan").exists()


class _Progress(RegressionTask):
    """Notes what `trainer.fit_loop` says in training steps."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, ...]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loop = self.trainer.fit_loop
        batches = loop.epoch_loop.batch_progress
        self.seen.append(
            (
                loop.batch_idx,
                loop.total_batch_idx,
                loop.epoch_progress.current.ready,
                loop.epoch_progress.current.completed,
                batches.current.ready,
                batches.total.ready,
                loop.epoch_loop.global_step,
            )
        )
        return super().training_step(batch, batch_idx)


def test_fit_loop_has_the_progress() -> None:
    task = _Progress()
    trainer = fitted(task, regression_loader(4), max_epochs=2, accumulate_grad_batches=2)
    expected: list[tuple[int, ...]] = []
    for total in range(8):
        epoch, index = divmod(total, 4)
        expected.append((index, total, epoch + 1, epoch, index + 1, total + 1, total // 2))
    assert task.seen == expected
    assert trainer.fit_loop.epoch_progress.total.ready == trainer.fit_loop.epoch_progress.current.completed == 2
    assert trainer.fit_loop.epoch_loop.batch_progress.total.completed == 8
    assert trainer.fit_loop.epoch_loop.batch_progress.is_last_batch


def test_the_limits_of_fit_loop_continue_a_fit() -> None:
    task = RegressionTask()
    trainer = fitted(task, regression_loader(4), max_epochs=1)
    trainer.fit_loop.max_epochs = 3
    trainer.fit_loop.max_steps = 10
    assert (trainer.max_epochs, trainer.max_steps) == (3, 10)
    trainer.fit(task, regression_loader(4))
    assert trainer.global_step == 10
    trainer.fit_loop.max_epochs = -1
    assert trainer.fit_loop.max_epochs == trainer.max_epochs == -1
    trainer.fit_loop.max_steps = trainer.fit_loop.min_epochs = trainer.fit_loop.min_steps = None
    assert trainer.max_steps == -1
    assert (trainer.fit_loop.min_epochs, trainer.fit_loop.epoch_loop.min_steps) == (0, 0)
    with pytest.raises(ConfigurationError, match="max_epochs='3': write a whole number"):
        trainer.fit_loop.max_epochs = "3"
    with pytest.raises(AttributeError, match=r"trainer\.fit_loop has no 'setup_data' here"):
        trainer.fit_loop.setup_data()
