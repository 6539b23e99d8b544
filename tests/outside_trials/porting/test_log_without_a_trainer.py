"""A step that is called by hand, in a unit test or a notebook, may log: it says once that the value goes nowhere."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_data, regression_loader
from trainwright.core.errors import TaskError, TrainwrightWarning


def _batch() -> list[torch.Tensor]:
    return [tensor[:2] for tensor in regression_data(4).tensors]


def _calls_by_hand(task: RegressionTask) -> None:
    with pytest.warns(TrainwrightWarning, match=r"log\('train_loss'\).*no Trainer.*values are discarded") as seen:
        loss = task.training_step(_batch(), 0)
    assert loss.requires_grad
    assert len(seen) == 1
    task.training_step(_batch(), 1)  # warnings are errors here
    task.validation_step(_batch(), 0)


def test_a_step_called_by_hand_warns_once_and_works() -> None:
    _calls_by_hand(RegressionTask())


def test_a_step_called_by_hand_after_a_fit_too() -> None:
    task = RegressionTask()
    quiet_trainer(max_epochs=1).fit(task, regression_loader(2))
    _calls_by_hand(task)


def test_each_task_warns_for_itself_and_a_fit_logs_as_ever() -> None:
    first, second = RegressionTask(), RegressionTask()
    _calls_by_hand(first)
    _calls_by_hand(second)
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(first, regression_loader(2))
    assert "train_loss" in trainer.callback_metrics


def test_logging_in_a_hook_of_a_run_that_has_no_epoch_is_still_an_error() -> None:
    class Early(RegressionTask):
        def setup(self, stage: str) -> None:
            self.log("early", 1.0)

    with pytest.raises(TaskError, match="log\\('early'\\)"):
        quiet_trainer(max_epochs=1).fit(Early(), regression_loader(2))
