"""The optimizers of a task that optimizes manually: what ported steps do with them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.helpers.runs import assert_equal_weights, quiet_trainer, weights_of
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.callbacks.callback import Callback
from trainwright.core.errors import TaskError


class _Counting(torch.optim.SGD):
    """SGD whose `step` has an argument of its own."""

    def step(self, closure: Any = None, *, factor: float = 1.0) -> Any:  # type: ignore[override]
        before = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] *= factor
        result = super().step(closure)
        for group, lr in zip(self.param_groups, before, strict=True):
            group["lr"] = lr
        return result


class _Manual(RegressionTask):
    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.body = body

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.body(self, batch)

    def configure_optimizers(self) -> Any:
        return _Counting(self.parameters(), lr=self.lr)


def _fit(body: Callable[..., Any], callback: Any = None, task: Any = None, **arguments: Any) -> Any:
    task = task or _Manual(body)
    quiet_trainer(max_epochs=1, callbacks=callback, **arguments).fit(task, regression_loader(3))
    return task


def test_the_wrapper_is_an_optimizer_and_the_torch_optimizer_is_there() -> None:
    def body(task: Any, batch: Any) -> None:
        optimizer, own = task.optimizers(), task.optimizers(use_pl_optimizer=False)
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert isinstance(optimizer, _Counting)
        assert type(own) is _Counting
        assert optimizer.optimizer is own is task.trainer.optimizers[0]
        assert optimizer.param_groups is own.param_groups
        assert repr(optimizer) == repr(own)
        optimizer.param_groups = own.param_groups  # what is assigned reaches the optimizer
        optimizer.seen = True
        assert own.seen
        assert "param_groups" not in vars(optimizer)

    _fit(body)


@pytest.mark.parametrize("keyword", [True, False])
def test_a_closure_and_arguments_of_the_optimizer_reach_its_step(keyword: bool) -> None:
    def by_closure(task: Any, batch: Any) -> None:
        optimizer = task.optimizers()

        def closure() -> torch.Tensor:
            loss: torch.Tensor = task.loss(batch)
            optimizer.zero_grad()
            task.manual_backward(loss)
            return loss

        loss = optimizer.step(closure=closure, factor=0.5) if keyword else optimizer.step(closure, factor=0.5)
        assert loss is not None

    def plain(task: Any, batch: Any) -> None:
        optimizer = task.optimizers()
        optimizer.zero_grad()
        task.manual_backward(task.loss(batch))
        optimizer.step(factor=0.5)

    assert_equal_weights(weights_of(_fit(by_closure)), weights_of(_fit(plain)))


class _Gradients(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, task: Any, optimizer: Any) -> None:
        gradient = task.net[0].weight.grad
        self.seen.append(0.0 if gradient is None else float(gradient.norm()))


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_hooks_before_a_step_see_the_gradients_of_its_closure(precision: str) -> None:
    own: list[float] = []

    def body(task: Any, batch: Any) -> None:
        optimizer = task.optimizers()

        def closure() -> torch.Tensor:
            loss: torch.Tensor = task.loss(batch) * 1e-3  # larger ones overflow at first
            optimizer.zero_grad()
            task.manual_backward(loss)
            own.append(float(task.net[0].weight.grad.norm()))
            return loss

        before = weights_of(task)
        assert optimizer.step(closure) is not None
        assert not torch.equal(before["net.0.weight"], task.net[0].weight)

    gradients = _Gradients()
    _fit(body, gradients, precision=precision)
    assert len(gradients.seen) == len(own) == 3
    assert all(seen > 0 for seen in gradients.seen)
    if precision == "32-true":
        assert gradients.seen == own
    else:  # unscaled by the time that hooks see them
        assert all(seen < scaled for seen, scaled in zip(gradients.seen, own, strict=True))


def test_lbfgs_steps_as_in_a_loop_of_one_s_own() -> None:
    class Lbfgs(_Manual):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    def body(task: Any, batch: Any) -> None:
        optimizer = task.optimizers()

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = task.loss(batch)
            task.manual_backward(loss)
            return loss

        optimizer.step(closure)

    reference = RegressionTask()
    optimizer = torch.optim.LBFGS(reference.parameters(), lr=0.1, max_iter=3)
    for batch in regression_loader(3):

        def closure(batch: Any = batch) -> Any:
            optimizer.zero_grad()
            loss = reference.loss(batch)
            loss.backward()
            return loss

        optimizer.step(closure)
    assert_equal_weights(weights_of(_fit(body, task=Lbfgs(body))), weights_of(reference))


def test_toggle_model_lets_only_its_own_parameters_learn_and_puts_them_back() -> None:
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

    _fit(body, task=Two(body))


def test_a_closure_that_is_none_is_an_error() -> None:
    with pytest.raises(TaskError, match="closure"):
        _fit(lambda task, batch: task.optimizers().step(task.loss(batch)))
