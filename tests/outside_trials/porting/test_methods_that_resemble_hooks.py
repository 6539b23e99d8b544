"""Helpers of the user's own that resemble hooks are let through; misspelt and removed hooks are errors that help."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.core.errors import ConfigurationError, TrainwrightWarning


def _task(name: str, **more: Any) -> Any:
    return type("Mine", (RegressionTask,), {name: lambda self, *args: None, **more})()


@pytest.mark.parametrize("name", ["train_step", "configure_optimizer", "training_steps", "val_dataloaderss"])
def test_a_helper_that_resembles_a_hook_is_warned_of_once(name: str) -> None:
    task, trainer = _task(name), quiet_trainer(max_epochs=1)
    with pytest.warns(TrainwrightWarning, match=f"Mine.{name} resembles the hook"):
        trainer.fit(task, regression_loader(1))
    trainer.fit(task, regression_loader(1))  # warnings are errors here


@pytest.mark.parametrize("name", ["val_step", "compute_loss", "step_size", "_train_step"])
def test_other_helpers_are_let_through(name: str) -> None:
    quiet_trainer(max_epochs=1).fit(_task(name), regression_loader(1))


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("on_train_epoch_edn", "on_train_epoch_end"),
        ("on_train_epoch_ends", "on_train_epoch_end"),
        ("on_trin_epoch_end", "on_train_epoch_end"),
        ("predict_stap", "predict_step"),
    ],
)
def test_one_edit_away_from_a_hook_that_is_missing_is_an_error(wrong: str, right: str) -> None:
    with pytest.raises(ConfigurationError, match=f"Mine.{wrong} is never called: the hook is named '{right}'"):
        quiet_trainer(max_epochs=1).fit(_task(wrong), regression_loader(1))


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("training_step_end", r"on_train_batch_end\(self, outputs, batch, batch_idx\)"),
        ("validation_step_end", "on_validation_batch_end"),
        ("training_epoch_end", r"on_train_epoch_end\(self\)"),
        ("validation_epoch_end", r"self.outputs.append.* in validation_step.*on_validation_epoch_end\(self\)"),
        ("test_epoch_end", "on_test_epoch_end"),
    ],
)
def test_a_removed_hook_is_answered_with_its_replacement(name: str, answer: str) -> None:
    with pytest.raises(ConfigurationError, match=f"Mine.{name} is never called: it was removed.*{answer}"):
        quiet_trainer(max_epochs=1).fit(_task(name), regression_loader(1))
