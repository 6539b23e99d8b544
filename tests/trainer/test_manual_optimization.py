from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from tests.helpers.tasks import Batch, RegressionTask, regression_data, regression_loader
from tests.trainer.runs import ByHand, fitted, quiet_trainer, weights_of
from trainwright.core.errors import ConfigurationError, TaskError


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "64-true"])
def test_a_task_that_optimizes_by_hand_trains_as_the_trainer_would(precision: str) -> None:
    by_hand, automatic = ByHand(), RegressionTask()
    trainer = fitted(by_hand, regression_loader(8, 2), max_epochs=2, precision=precision)
    quiet_trainer(max_epochs=2, precision=precision).fit(automatic, regression_loader(8, 2))
    torch.testing.assert_close(weights_of(by_hand), weights_of(automatic), rtol=0, atol=0)
    assert trainer.global_step == 8


@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_scaled_loss_is_unscaled_before_gradients_are_clipped_and_stepped_by_hand(clip: float | None) -> None:
    by_hand, automatic = ByHand(clip=clip), RegressionTask()
    quiet_trainer(max_epochs=2, precision="16-mixed").fit(by_hand, regression_loader(16, 2))
    quiet_trainer(max_epochs=2, precision="16-mixed", gradient_clip_val=clip).fit(automatic, regression_loader(16, 2))
    torch.testing.assert_close(weights_of(by_hand), weights_of(automatic))


def test_the_scale_of_a_loss_changes_only_after_all_optimizers_have_stepped() -> None:
    seen: list[float] = []

    def step_both(task: Any, batch: Batch) -> None:
        for optimizer in task.optimizers():
            optimizer.zero_grad()
        task.manual_backward(task.loss(batch) * (math.inf if len(seen) == 2 else 1e-6))
        for optimizer in task.optimizers():
            optimizer.step()
            seen.append(task.trainer.scaler.get_scale())

    task: Any = _Manual(step_both)
    task.configure_optimizers = lambda: [torch.optim.SGD([p], lr=0.1) for p in task.net[0].parameters()]
    quiet_trainer(max_epochs=1, precision="16-mixed").fit(task, regression_loader(6, 2))
    assert seen == [65536.0] * 4 + [32768.0] * 2


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


def test_a_schedule_may_be_made_of_the_optimizer_that_the_trainer_returns() -> None:
    rates = []

    def body(task: Any, batch: Any) -> None:
        optimizer = task.optimizers()
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5, last_epoch=len(rates) - 1)
        task.manual_backward(task.loss(batch))
        optimizer.step()
        schedule.step()
        rates.append(optimizer.optimizer.param_groups[0]["lr"])

    trainer = fitted(_Manual(body), regression_loader(3), max_epochs=1)
    assert (rates, trainer.global_step) == ([0.025, 0.0125, 0.00625], 3)


def test_toggle_model_freezes_other_parameters_and_restores_them() -> None:
    class Two(_Manual):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.net[i].parameters(), lr=0.1) for i in (0, 3)]

    def required(task: Any) -> list[bool]:
        return [parameter.requires_grad for parameter in task.net.parameters()]

    def body(task: Any, batch: Any) -> None:
        first, second = task.optimizers()
        for toggled in (first.toggle_model(), task.toggled_optimizer(first)):
            with toggled:
                assert required(task) == [True, True, False, False]
            assert required(task) == [True] * 4
        with contextlib.suppress(ZeroDivisionError), second.toggle_model(sync_grad=False):
            assert required(task) == [False, False, True, True]
            assert task.trainer.strategy.step._is_in_no_sync
            raise ZeroDivisionError
        assert required(task) == [True] * 4
        assert not task.trainer.strategy.step._is_in_no_sync

    quiet_trainer(max_epochs=1).fit(Two(body), regression_loader(3))


def _trained(task: RegressionTask, precision: str = "32-true") -> torch.Tensor:
    quiet_trainer(max_epochs=2, precision=precision).fit(task, regression_loader(8, 2))
    return weights_of(task)


class _WarmsUp(RegressionTask):
    """Sets the learning rate in its own step, which is how a warm-up is often written."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, int]] = []

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Optimizer, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        self.calls.append((epoch, batch_idx))
        assert isinstance(optimizer, torch.optim.SGD)
        for group in optimizer.param_groups:
            group["lr"] = self.lr * min(1.0, (self.trainer.global_step + 1) / 4)
        assert optimizer.step(closure=optimizer_closure) is not None


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler:UserWarning")  # the first scaled step overflows
def test_the_optimizer_may_be_stepped_in_the_tasks_own_way(precision: str) -> None:
    class Scheduled(RegressionTask):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
            ramp = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
            return [optimizer], [{"scheduler": ramp, "interval": "step"}]

    task = _WarmsUp()
    assert torch.equal(_trained(task, precision), _trained(Scheduled(), precision))
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


def test_lbfgs_and_a_scaled_loss_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"precision='16-mixed' uses loss scaling"):
        quiet_trainer(max_epochs=1, precision="16-mixed").fit(_Lbfgs(), regression_loader(8, 8))


def test_a_closure_is_passed_by_name() -> None:
    class OwnOrder(torch.optim.SGD):
        def step(self, scale: float = 1.0, closure: Any = None) -> Any:  # type: ignore[override]  # the point
            return super().step(closure)

    class Task(RegressionTask):
        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            if self.automatic_optimization:
                return super().training_step(batch, batch_idx)
            return self.optimizers().step(closure=lambda: self.manual_backward(self.loss(batch)))

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

        def configure_optimizers(self) -> Any:
            return OwnOrder(self.parameters(), lr=0.1)

    for automatic in (True, False):
        task = Task()
        task.automatic_optimization = automatic
        before = weights_of(task)
        quiet_trainer(max_steps=1).fit(task, regression_loader(1))
        assert not torch.equal(before, weights_of(task))
