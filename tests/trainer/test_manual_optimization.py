"""Optimization by hand: several optimizers, accumulation, schedules, closures, and what the Trainer still does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.helpers.tasks import Batch, RegressionTask, regression_loader
from tests.trainer.runs import ByHand, Gan, fitted, quiet_trainer, weights_of
from trainwright.core.errors import ConfigurationError, TaskError


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "64-true"])
def test_a_task_that_optimizes_by_hand_trains_as_the_trainer_would(precision: str) -> None:
    by_hand, automatic = ByHand(), RegressionTask()
    trainer = fitted(by_hand, regression_loader(8, 2), max_epochs=2, precision=precision)
    quiet_trainer(max_epochs=2, precision=precision).fit(automatic, regression_loader(8, 2))
    torch.testing.assert_close(weights_of(by_hand), weights_of(automatic), rtol=0, atol=0)
    assert trainer.global_step == 8


def test_a_scaled_loss_is_unscaled_before_a_step_by_hand() -> None:
    by_hand, automatic = ByHand(), RegressionTask()
    quiet_trainer(max_epochs=2, precision="16-mixed").fit(by_hand, regression_loader(16, 2))
    quiet_trainer(max_epochs=2, precision="16-mixed").fit(automatic, regression_loader(16, 2))
    torch.testing.assert_close(weights_of(by_hand), weights_of(automatic))


def test_two_optimizers_take_turns_and_a_batch_is_one_step() -> None:
    task = Gan()
    before = weights_of(task.generator), weights_of(task.discriminator)
    trainer = fitted(task, regression_loader(4), max_epochs=1)
    assert task.trainable == [(True, False), (False, True), (True, True)] * 4
    assert not torch.equal(weights_of(task.generator), before[0])
    assert not torch.equal(weights_of(task.discriminator), before[1])
    assert trainer.global_step == 4
    assert trainer.state.batches == 4


@pytest.mark.parametrize(("bound", "counts"), [({"max_epochs": 1}, (16, 64)), ({"max_steps": 3}, (3, 12))], ids=str)
def test_the_clock_counts_only_batches_in_which_an_optimizer_stepped(
    bound: dict[str, int], counts: tuple[int, int]
) -> None:
    trainer = fitted(ByHand(4), regression_loader(64), **bound)
    assert (trainer.global_step, trainer.state.batches) == counts


@pytest.mark.parametrize("argument", [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 1.0}])
def test_what_only_automatic_optimization_does_is_refused(argument: dict[str, Any]) -> None:
    trainer = quiet_trainer(max_epochs=1, **argument)
    with pytest.raises(ConfigurationError, match=f"{next(iter(argument))}.*uses manual optimization"):
        trainer.fit(ByHand(), regression_loader(2))


def test_manual_backward_in_automatic_optimization_is_refused() -> None:
    class Task(RegressionTask):
        def training_step(self, batch: Batch, batch_idx: int) -> None:
            self.manual_backward(self.loss(batch))

    with pytest.raises(TaskError, match=r"calls manual_backward, but automatic_optimization is True"):
        quiet_trainer(max_epochs=1).fit(Task(), regression_loader(2))


class _Manual(RegressionTask):
    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.body = body

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.body(self, batch)


def test_a_closure_reaches_the_optimizers_step() -> None:
    def by_closure(task: Any, batch: Any) -> None:
        optimizer = task.optimizers()

        def closure() -> torch.Tensor:
            loss: torch.Tensor = task.loss(batch)
            optimizer.zero_grad()
            task.manual_backward(loss)
            return loss

        assert optimizer.step(closure=closure) is not None

    task, automatic = _Manual(by_closure), RegressionTask()
    for each in (task, automatic):
        quiet_trainer(max_epochs=1).fit(each, regression_loader(3))
    assert torch.equal(weights_of(task), weights_of(automatic))


def test_toggle_model_freezes_other_parameters_and_restores_them() -> None:
    class Two(_Manual):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.net[i].parameters(), lr=0.1) for i in (0, 3)]

    def required(task: Any) -> list[bool]:
        return [parameter.requires_grad for parameter in task.net.parameters()]

    def body(task: Any, batch: Any) -> None:
        first, second = task.optimizers()
        with first.toggle_model():
            assert required(task) == [True, True, False, False]
        with contextlib.suppress(ZeroDivisionError), second.toggle_model(sync_grad=False):
            assert required(task) == [False, False, True, True]
            assert task.trainer.strategy.step._holds_back
            raise ZeroDivisionError
        assert required(task) == [True] * 4
        assert not task.trainer.strategy.step._holds_back

    quiet_trainer(max_epochs=1).fit(Two(body), regression_loader(3))
