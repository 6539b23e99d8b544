"""Warnings of the training loop: steps without a loss, delayed stops, disabled shuffling."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import Batch, RecordingCallback, RegressionTask, regression_loader
from trainwright.core.errors import TrainwrightWarning


class _NoLoss(RegressionTask):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.loss(batch)


def test_missing_losses_are_a_warning_before_a_long_epoch_ends() -> None:
    seen: list[int] = []

    def note(event: str, trainer: Any) -> None:
        seen.append(len(told))

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        quiet_trainer(max_epochs=1, callbacks=RecordingCallback("on_train_batch_end", note=note)).fit(
            _NoLoss(), regression_loader(64)
        )
    assert seen.index(1) in range(49, 60)
    assert "so far" in str(told[0].message)


def _stopping_at(step: int, **arguments: Any) -> Any:
    def note(event: str, trainer: Any) -> None:
        if trainer.global_step >= step:
            trainer.should_stop = True

    trainer = quiet_trainer(callbacks=RecordingCallback("on_train_step_end", note=note), **arguments)
    trainer.fit(RegressionTask(), regression_loader(4))
    return trainer


def test_a_delayed_stop_is_a_warning_once() -> None:
    with pytest.warns(TrainwrightWarning, match=r"by epoch 0, step 2\. .* until min_epochs=2 and min_steps=9 are"):
        trainer = _stopping_at(2, max_epochs=5, min_epochs=2, min_steps=9)
    assert trainer.global_step == 9


def test_the_reason_of_the_stop_is_named() -> None:
    def note(event: str, trainer: Any) -> None:
        trainer.request_stop("it is good enough")

    trainer = quiet_trainer(max_epochs=5, min_epochs=2, callbacks=RecordingCallback("on_train_step_end", note=note))
    with pytest.warns(
        TrainwrightWarning, match=r"\(it is good enough\)\. Training continues until min_epochs=2 is"
    ) as told:
        trainer.fit(RegressionTask(), regression_loader(4))
    assert len(told) == 1


def test_a_stop_after_min_epochs_is_not_delayed() -> None:
    assert _stopping_at(4, max_epochs=5, min_epochs=1).current_epoch == 1
