"""One value is shown under one name, and a learning rate can be read where other metrics can."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.callbacks.callback import Callback
from trainwright.callbacks.learning_rate_monitor import LearningRateMonitor
from trainwright.core.errors import ConfigurationError
from trainwright.data import CombinedLoader


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


class _Writes(RegressionTask):
    def __init__(self) -> None:
        super().__init__()
        self.written = 0

    def predict_step(self, batch: Any, batch_idx: int) -> None:
        self.written += 1


@pytest.mark.parametrize("keep", [True, False])
def test_a_prediction_of_none_is_kept_as_none(keep: bool) -> None:
    task = _Writes()
    found = quiet_trainer().predict(task, regression_loader(3), return_predictions=keep)
    assert found == ([None] * 3 if keep else None)
    assert task.written == 3


def test_a_combined_loader_gives_batches_with_their_places() -> None:
    side_by_side = CombinedLoader({"a": range(2), "b": range(3)})
    assert list(side_by_side) == [({"a": 0, "b": 0}, 0, 0), ({"a": 1, "b": 1}, 1, 0)]
    one_by_one = CombinedLoader([range(1), range(2)], mode="sequential")
    batch, batch_idx, dataloader_idx = next(iter(one_by_one))
    assert (batch, batch_idx, dataloader_idx) == (0, 0, 0)
    assert list(one_by_one) == [(0, 0, 0), (0, 0, 1), (1, 1, 1)]


def test_a_combined_loader_in_another_gives_its_batches_there() -> None:
    outer = CombinedLoader({"x": CombinedLoader([range(2), range(2)]), "y": range(2)})
    assert list(outer) == [({"x": [0, 0], "y": 0}, 0, 0), ({"x": [1, 1], "y": 1}, 1, 0)]


class _Two(RegressionTask):
    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:  # type: ignore[override]
        self.log(f"x{dataloader_idx}", float(batch_idx), add_dataloader_idx=False)
        self.log("y", float(dataloader_idx))

    def on_test_epoch_end(self) -> None:
        self.log("total", 7.0)


def test_each_loader_s_results_are_its_own() -> None:
    loaders = [regression_loader(4), regression_loader(4)]
    assert quiet_trainer().test(_Two(), loaders, verbose=False) == [
        {"x0": 1.5, "y/dataloader_idx_0": 0.0, "total": 7.0},
        {"x1": 1.5, "y/dataloader_idx_1": 1.0, "total": 7.0},
    ]


def test_one_name_over_two_loaders_is_an_error() -> None:
    class Mixes(RegressionTask):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("y", 1.0, add_dataloader_idx=False)

    with pytest.raises(ConfigurationError, match=r"log\('y'.*dataloaders 0 and 1, whose values would mix"):
        quiet_trainer().test(Mixes(), [regression_loader(2), regression_loader(2)], verbose=False)
