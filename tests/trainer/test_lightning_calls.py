"""Calls that code for Lightning makes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.tasks import RegressionTask, regression_loader
from tests.trainer.runs import fitted, quiet_trainer
from trainwright.core.errors import ConfigurationError, TrainwrightWarning
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


class _Changing(RegressionTask):
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        kept = copy.deepcopy(checkpoint["hyper_parameters"])
        kept.update(width=3)
        checkpoint["hyper_parameters"].update(width=3)


def test_a_change_of_what_a_checkpoint_holds_is_refused_by_name(tmp_path: Path) -> None:
    fitted(RegressionTask(), regression_loader(2), max_epochs=1).save_checkpoint(tmp_path / "saved")
    trainer = quiet_trainer(max_epochs=2)
    with pytest.raises(ConfigurationError, match=r"on_load_checkpoint cannot change checkpoint\['hyper_parameters'\]"):
        trainer.fit(_Changing(), regression_loader(2), ckpt_path=tmp_path / "saved")


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


@pytest.mark.parametrize("accumulate", [1, 2])
def test_fit_loop_has_the_progress(accumulate: int) -> None:
    task = _Progress()
    trainer = fitted(task, regression_loader(4), max_epochs=2, accumulate_grad_batches=accumulate)
    expected: list[tuple[int, ...]] = []
    for total in range(8):
        epoch, index = divmod(total, 4)
        expected.append((index, total, epoch + 1, epoch, index + 1, total + 1, total // accumulate))
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
    for limits in (trainer, trainer.fit_loop):
        with pytest.raises(ConfigurationError, match="max_epochs='3': write a whole number"):
            limits.max_epochs = "3"


def test_what_fit_loop_lacks_is_answered() -> None:
    trainer = quiet_trainer()
    with pytest.raises(AttributeError, match=r"trainer\.fit_loop has no 'setup_data' here"):
        trainer.fit_loop.setup_data()
    with pytest.raises(AttributeError):
        trainer.fit_loop.no_such = 1
