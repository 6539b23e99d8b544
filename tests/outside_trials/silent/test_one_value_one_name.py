"""One value is shown under one name, and a learning rate can be read where other metrics can."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.callbacks.callback import Callback
from trainwright.callbacks.learning_rate_monitor import LearningRateMonitor


class _Tests(RegressionTask):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("a", float(batch_idx), on_step=True)
        self.log("b", 1.0)


def test_what_a_step_and_an_epoch_log_is_shown_once(capsys: Any) -> None:
    trainer = quiet_trainer()
    assert trainer.test(_Tests(), regression_loader(4)) == [{"a_epoch": 1.5, "b": 1.0}]
    assert trainer.callback_metrics["a"] == trainer.callback_metrics["a_epoch"] == 1.5
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["test", "a_epoch", "b"]


def test_learning_rates_are_among_the_metrics(tmp_path: Path) -> None:
    seen: list[float] = []

    class Reads(Callback):
        def on_train_batch_end(self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(trainer.callback_metrics["lr-SGD"])

    callbacks = [LearningRateMonitor(), Reads()]
    trainer = quiet_trainer(max_epochs=1, callbacks=callbacks, logger="csv", default_root_dir=tmp_path)
    trainer.fit(RegressionTask(lr=0.25), regression_loader(3))
    assert seen == [0.25] * 3
    assert trainer.callback_metrics["lr-SGD"].item() == 0.25
