"""What a task may return from its step or do in its own way: backward, the optimizer's step, clearing gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from tests.helpers.tasks import Batch, RegressionTask, StepTask, regression_data, regression_loader
from tests.trainer.runs import fitted, quiet_trainer, weights_of
from trainwright.core.errors import ConfigurationError, TrainwrightWarning


def _trained(task: RegressionTask, **arguments: Any) -> torch.Tensor:
    quiet_trainer(**{"max_epochs": 2, **arguments}).fit(task, regression_loader(8, 2))
    return weights_of(task)


def test_a_step_may_return_none_to_skip_its_batch() -> None:
    task = StepTask(lambda task, batch, idx: None)
    before = weights_of(task)
    with pytest.warns(TrainwrightWarning, match="training_step returned None for each of the 4 batches") as told:
        trainer = fitted(task, regression_loader(4), max_epochs=2)
    assert len(told) == 1
    assert torch.equal(weights_of(task), before)
    assert (trainer.global_step, trainer.state.batches, trainer.current_epoch) == (0, 8, 2)


def test_backward_may_be_run_in_the_tasks_own_way() -> None:
    calls: list[torch.Size] = []

    class Task(RegressionTask):
        def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            calls.append(loss.shape)
            (2 * loss).backward()

    assert torch.equal(_trained(Task()), _trained(RegressionTask(lr=0.1)))
    assert calls == [torch.Size([])] * 8


class _WarmsUp(RegressionTask):
    """Sets the learning rate in its own step, which is how a warm-up is often written."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, int]] = []

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Optimizer, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        self.calls.append((epoch, batch_idx))
        for group in optimizer.param_groups:
            group["lr"] = self.lr * min(1.0, (self.trainer.global_step + 1) / 4)
        optimizer.step(closure=optimizer_closure)


def test_the_optimizer_may_be_stepped_in_the_tasks_own_way() -> None:
    class Scheduled(RegressionTask):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
            ramp = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
            return [optimizer], [{"scheduler": ramp, "interval": "step"}]

    task = _WarmsUp()
    assert torch.equal(_trained(task), _trained(Scheduled()))
    assert task.calls == [(epoch, idx) for epoch in range(2) for idx in range(4)]


class _Lbfgs(RegressionTask):
    def __init__(self) -> None:
        super().__init__()
        self.evaluations = 0

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        self.evaluations += 1
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=6)


def test_lbfgs_trains_as_in_a_loop_written_by_hand() -> None:
    task, by_hand = _Lbfgs(), _Lbfgs()
    trainer = fitted(task, regression_loader(8, 8), max_epochs=3)
    optimizer = by_hand.configure_optimizers()
    batch = list(regression_data(8).tensors)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = by_hand.training_step(batch, 0)
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    torch.testing.assert_close(weights_of(task), weights_of(by_hand), rtol=1e-4, atol=1e-6)
    assert task.evaluations == by_hand.evaluations
    assert trainer.global_step == 3


def test_lbfgs_evaluates_the_whole_group_when_gradients_are_accumulated() -> None:
    whole, pieces = _Lbfgs(), _Lbfgs()
    quiet_trainer(max_epochs=2).fit(whole, regression_loader(8, 8))
    quiet_trainer(max_epochs=2, accumulate_grad_batches=4).fit(pieces, regression_loader(8, 2))
    torch.testing.assert_close(weights_of(pieces), weights_of(whole), rtol=1e-3, atol=1e-5)
    assert pieces.evaluations == 4 * whole.evaluations


def test_lbfgs_and_a_scaled_loss_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"precision='16-mixed' uses loss scaling"):
        quiet_trainer(max_epochs=1, precision="16-mixed").fit(_Lbfgs(), regression_loader(8, 8))
