from __future__ import annotations

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.runs import fitted, quiet_trainer
from tests.helpers.tasks import Batch, RegressionTask, regression_loader
from tests.loggers.test_contract import csv_points, jsonl_points, tensorboard_points
from trainwright.callbacks.callback import Callback
from trainwright.core.errors import TrainwrightWarning
from trainwright.core.metric_value import MetricValue
from trainwright.loggers import CSVLogger, JSONLinesLogger, TensorBoardLogger


def test_a_step_called_by_hand_warns_once_and_a_later_fit_logs() -> None:
    task, batch = RegressionTask(), next(iter(regression_loader(2, 2)))
    with pytest.warns(TrainwrightWarning, match=r"log\('train_loss'\).*no Trainer.*values are discarded"):
        assert task.training_step(batch, 0).requires_grad
    task.training_step(batch, 1)  # warnings are errors here
    assert "train_loss" in fitted(task, regression_loader(2), max_epochs=1).callback_metrics


class StepsTask(RegressionTask):
    """Logs the number of each evaluation step in three ways. The numbers are those that the rows must have."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"validate": 0, "test": 0}

    def _log(self, stage: str) -> None:
        number = self.counts[stage]
        self.counts[stage] += not self.trainer.sanity_checking
        self.log(f"{stage}_both", torch.tensor(float(number)), on_step=True, on_epoch=True)
        self.log(f"{stage}_constant", 0.5, on_step=True, on_epoch=False)
        if number % 2:
            self.log(f"{stage}_odd", float(number), on_step=True, on_epoch=False, sync_dist=True)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._log("validate")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._log("test")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["counts"] = dict(self.counts)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.counts = dict(checkpoint["counts"])


POINTS = {CSVLogger: csv_points, JSONLinesLogger: jsonl_points, TensorBoardLogger: tensorboard_points}


@pytest.mark.slow
@pytest.mark.parametrize("kind", POINTS)
def test_each_batch_of_an_evaluation_is_a_row_of_a_log_of_its_own_also_after_a_resume(
    kind: Any, tmp_path: Path
) -> None:
    def session(max_epochs: int, ckpt_path: Any = None) -> tuple[Any, Path]:
        logger, task = kind(tmp_path), StepsTask()
        trainer = quiet_trainer(max_epochs=max_epochs, logger=logger, num_sanity_val_steps=2)
        trainer.fit(task, regression_loader(2), regression_loader(12, 4), ckpt_path=ckpt_path)
        saved = trainer.save_checkpoint(tmp_path / f"after-{max_epochs}")
        trainer.test(task, regression_loader(12, 4), verbose=False)
        return logger, saved

    epochs, num_batches = 2, 3
    logger, saved = session(epochs)
    session(epochs + 2, saved)  # the next session discards its steps
    epochs += 1
    logger, _ = session(epochs, saved)
    assert logger.version == 0
    points = POINTS[kind]
    for stage, total in (("validate", epochs * num_batches), ("test", num_batches)):
        log = SimpleNamespace(log_dir=str(Path(logger.log_dir, stage)))
        assert points(log, f"{stage}_both_step") == [(step, float(step)) for step in range(total)]
        assert points(log, f"{stage}_constant") == [(step, 0.5) for step in range(total)]
        assert points(log, f"{stage}_odd") == [(step, float(step)) for step in range(1, total, 2)]
        assert points(logger, f"{stage}_both_step") == []
        assert points(logger, f"{stage}_both_epoch")[-1][1] == total - 2
    assert [step for step, _ in points(logger, "validate_both_epoch")] == [2 * epoch + 1 for epoch in range(epochs)]


def test_a_metric_value_works_as_a_float_and_as_a_tensor() -> None:
    value = MetricValue(0.25)
    assert value == value.item() == value.cpu().numpy() == value.detach().cpu().item() == value.clone().tolist() == 0.25
    assert f"{value:.3f} {value}" == "0.250 0.25"
    assert json.dumps({"a": value}) == '{"a": 0.25}'
    for tensor in (torch.tensor(value), value.to("cpu"), value.float(), torch.stack([value])[0]):
        assert isinstance(tensor, torch.Tensor)
        assert tensor == 0.25
    assert torch.tensor(2.0) * value == value * torch.tensor(2.0) == 0.5
    assert np.mean([value, value]) == 0.25
    assert (value.ndim, value.shape, value.dtype, value.device.type) == (0, (), torch.float32, "cpu")
    with pytest.raises(AttributeError):
        value.no_such_method()


class Logging(Callback):
    def on_train_batch_end(self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("index", float(batch_idx), on_step=False, on_epoch=True, reduce_fx="max")

    def on_validation_epoch_end(self, trainer: Any, task: Any) -> None:
        self.log_dict({"a": 1.0, "b": 2.0}, prog_bar=True)


def test_callbacks_can_log() -> None:
    trainer = fitted(RegressionTask(), regression_loader(4), regression_loader(4), max_epochs=1, callbacks=Logging())
    assert trainer.callback_metrics["index"] == 3.0
    assert {name: trainer.progress_bar_metrics[name] for name in ("a", "b")} == {"a": 1.0, "b": 2.0}


def test_the_hook_at_the_end_of_an_epoch_reads_its_value_from_the_progress_bar() -> None:
    class Task(RegressionTask):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.log("index", float(batch_idx), on_step=True, on_epoch=True, prog_bar=True)
            return super().training_step(batch, batch_idx)

        def on_train_epoch_end(self) -> None:
            assert self.trainer.progress_bar_metrics["index_epoch"] == 1.5

    fitted(Task(), regression_loader(4), max_epochs=2)


def test_a_logged_step_is_the_x_value_of_the_loggers(tmp_path: Path) -> None:
    class Task(RegressionTask):
        def on_train_epoch_end(self) -> None:
            self.log_dict({"step": 10.0 + self.current_epoch, "accuracy": 0.5})

    logger = CSVLogger(tmp_path)
    fitted(Task(), regression_loader(4), max_epochs=2, logger=logger)
    with open(Path(logger.log_dir or "") / "metrics.csv") as file:
        assert {row["step"] for row in csv.DictReader(file) if row["accuracy"]} == {"10", "11"}


def test_logged_metrics_are_known_in_the_hooks_at_the_end_of_an_epoch() -> None:
    seen: dict[str, list[str]] = {}

    class Task(RegressionTask):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("a", loss, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("b", batch_idx)

        def on_train_epoch_end(self) -> None:
            seen["train"] = sorted(self.trainer.logged_metrics)

        def on_validation_epoch_end(self) -> None:
            seen["validate"] = sorted(self.trainer.logged_metrics)

    quiet_trainer(max_epochs=1).fit(Task(), regression_loader(2), regression_loader(2))
    assert "b" in seen["validate"]
    assert {"a_epoch", "a_step", "b"} <= {*seen["train"]}


def test_step_values_of_a_validation_are_known_without_a_logger() -> None:
    class Task(RegressionTask):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("b", float(batch_idx), on_step=True, on_epoch=False)

    trainer = quiet_trainer(max_epochs=1, logger=False)
    trainer.fit(Task(), regression_loader(2), regression_loader(4))
    assert "b" in trainer.logged_metrics


def test_a_log_method_that_the_user_has_replaced_stays_after_the_run() -> None:
    task = RegressionTask()
    names: list[str] = []
    replacement = lambda name, value, **options: names.append(name)  # noqa: E731
    task.log = replacement  # type: ignore[method-assign]
    quiet_trainer(max_epochs=1).fit(task, regression_loader(2))
    assert names
    assert task.log is replacement
