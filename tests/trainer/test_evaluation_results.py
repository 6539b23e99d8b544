"""Results of evaluation and prediction."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.core.errors import ConfigurationError


class _Tests(RegressionTask):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("a", float(batch_idx), on_step=True)
        self.log("b", 1.0)


def test_a_metric_of_step_and_epoch_is_shown_once(capsys: Any) -> None:
    trainer = quiet_trainer()
    assert trainer.test(_Tests(), regression_loader(4)) == [{"a_epoch": 1.5, "b": 1.0}]
    assert trainer.callback_metrics["a"] == trainer.callback_metrics["a_epoch"] == 1.5
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["test", "a_epoch", "b"]


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


class _Two(RegressionTask):
    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:  # type: ignore[override]
        self.log(f"x{dataloader_idx}", float(batch_idx), add_dataloader_idx=False)
        self.log("y", float(dataloader_idx))

    def on_test_epoch_end(self) -> None:
        self.log("total", 7.0)


def test_each_loader_has_its_own_results() -> None:
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
