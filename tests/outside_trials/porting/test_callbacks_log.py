"""A callback logs with `self.log` and `self.log_dict`, as a task does."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.callbacks.callback import Callback
from trainwright.core.errors import TaskError


class Logging(Callback):
    """Logs in a step's hook and at the ends of epochs."""

    def on_train_batch_end(self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("index", float(batch_idx), on_step=False, on_epoch=True, reduce_fx="max")

    def on_validation_epoch_end(self, trainer: Any, task: Any) -> None:
        self.log_dict({"a": 1.0, "b": 2.0}, prog_bar=True)


def test_what_a_callback_logs_is_a_metric_of_the_run() -> None:
    trainer = quiet_trainer(max_epochs=1, callbacks=Logging())
    trainer.fit(RegressionTask(), regression_loader(4), regression_loader(4))
    assert trainer.callback_metrics["index"] == 3.0
    assert {name: trainer.progress_bar_metrics[name] for name in ("a", "b")} == {"a": 1.0, "b": 2.0}


def test_a_callback_without_a_stage_says_when_it_can_log() -> None:
    callback = Logging()
    quiet_trainer(max_steps=1, callbacks=callback).fit(RegressionTask(), regression_loader(4))
    with pytest.raises(TaskError, match=r"Logging\.log works in its hooks while a Trainer runs a stage"):
        callback.log("a", 1.0)
    assert vars(callback) == {}
