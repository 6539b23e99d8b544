"""Steps with loss scaling, item counts or hooks of a task's own train as plain ones, or as a loop by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.runs import assert_equal_weights, fitted, weights_of
from tests.helpers.tasks import Batch, RegressionTask, StepTask, regression_loader
from trainwright.core.errors import TrainwrightWarning
from trainwright.data import DataModule

_LOADER = regression_loader(8, 2)


class _StepsItself(RegressionTask):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        assert isinstance(optimizer, torch.optim.SGD)
        assert optimizer.param_groups[0]["lr"] == self.lr
        self.log("closure", optimizer.step(closure=optimizer_closure))


def test_a_task_may_step_a_scaled_optimizer_itself() -> None:
    tasks = _StepsItself(), RegressionTask()
    trainers = [fitted(task, _LOADER, max_epochs=1, precision="16-mixed") for task in tasks]
    assert_equal_weights(*map(weights_of, tasks))
    assert not torch.equal(tasks[0].net[0].weight, RegressionTask().net[0].weight)
    assert trainers[0].callback_metrics["closure"] == trainers[1].callback_metrics["train_loss"]


def test_a_scaled_run_goes_on_after_a_skipped_step() -> None:
    skipping = StepTask(lambda task, batch, idx: task.loss(batch) * (float("nan") if idx == 1 else 1.0))
    with pytest.warns(TrainwrightWarning, match="it is skipped"):
        fitted(skipping, _LOADER, max_epochs=1, precision="16-mixed", on_nonfinite="skip")
    plain = RegressionTask()
    fitted(plain, [batch for i, batch in enumerate(_LOADER) if i != 1], max_epochs=1, precision="16-mixed")
    assert_equal_weights(weights_of(skipping), weights_of(plain))


def test_a_micro_batch_without_loss_is_left_out_of_the_mean_over_items() -> None:
    class Counts(StepTask):
        def num_items(self, batch: Batch) -> int:
            return len(batch[0])

    inputs, targets = regression_loader(6, 6).dataset.tensors  # type: ignore[attr-defined]
    parts = list(zip(inputs.split([1, 2, 3]), targets.split([1, 2, 3]), strict=True))
    counts = Counts(lambda task, batch, idx: None if idx == 1 else task.loss(batch))
    fitted(counts, parts, max_epochs=1, accumulate_grad_batches=3)
    plain, kept = RegressionTask(), [0, 3, 4, 5]
    plain.loss([inputs[kept], targets[kept]]).backward()
    plain.configure_optimizers().step()
    torch.testing.assert_close(weights_of(counts), weights_of(plain))


def test_a_data_module_may_change_batches_on_the_device() -> None:
    class Doubles(DataModule):
        def train_dataloader(self) -> Any:
            return _LOADER

        def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
            return [2 * part for part in batch]

    changed, plain = RegressionTask(), RegressionTask()
    fitted(changed, Doubles(), max_epochs=1)
    fitted(plain, [[2 * part for part in batch] for batch in _LOADER], max_epochs=1)
    assert_equal_weights(weights_of(changed), weights_of(plain))
