"""Callbacks that do nothing cost no call, and no step reads a tensor between two flushes."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import Batch, RegressionTask, regression_loader
from trainwright.callbacks.callback import Callback

_FIRST, _LAST = 10, 30  # steps between which calls are counted: everything is warm, no epoch begins or ends


class _Counts(Callback):
    """Counts Python calls between two steps."""

    def __init__(self) -> None:
        self.calls = 0

    def _count(self, frame: Any, event: str, argument: Any) -> None:
        self.calls += event == "call"

    def on_train_step_end(self, trainer: Any, task: Any, result: Any) -> None:
        if trainer.global_step == _FIRST:
            sys.setprofile(self._count)
        elif trainer.global_step == _LAST:
            sys.setprofile(None)


class _Nothing(Callback):
    """Overrides no event."""

    state_key = property(lambda self: str(id(self)))  # type: ignore[assignment]


def _calls_per_step(make_callbacks: Callable[[], list[Callback]], **arguments: Any) -> float:
    counts = _Counts()
    trainer = quiet_trainer(max_epochs=1, callbacks=[*make_callbacks(), counts], **arguments)
    gc.disable()  # collections come when they will, and others may listen to them
    try:
        trainer.fit(RegressionTask(), regression_loader(64))
    finally:
        gc.enable()
        sys.setprofile(None)
    return counts.calls / (_LAST - _FIRST)


def test_eight_callbacks_that_do_nothing_cost_not_one_call() -> None:
    without = _calls_per_step(list, gradient_clip_val=1.0)
    with_eight = _calls_per_step(lambda: [_Nothing() for _ in range(8)], gradient_clip_val=1.0)
    assert without > 0
    assert with_eight == without


_READS = {"item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__", "__array__", "is_nonzero"}


class _NoReadByDispatch(TorchDispatchMode):
    """Refuses the operator behind `item()`, `float(t)` and `if t`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default):
            raise AssertionError(f"a step read a tensor: {func}")
        return func(*args, **(kwargs or {}))


class _NoReadByName(TorchFunctionMode):
    """Refuses the methods that hand a tensor's values to the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _READS:
            raise AssertionError(f"a step read a tensor: {func.__name__}")
        return func(*args, **(kwargs or {}))


class _Forbids(Callback):
    """Forbids reads from the first step's end to the last batch's, both within one epoch and before any flush."""

    def __init__(self, last_batch: int) -> None:
        self.last_batch = last_batch
        self.modes: list[Any] = []
        self.guarded = 0

    def on_train_step_end(self, trainer: Any, task: Any, result: Any) -> None:
        if trainer.global_step == 1:
            self.modes = [_NoReadByDispatch(), _NoReadByName()]
            for mode in self.modes:
                mode.__enter__()
        elif trainer.state.batch_in_epoch >= self.last_batch and self.modes:
            self._leave()
        self.guarded += bool(self.modes)

    def on_exception(self, trainer: Any, task: Any, exception: BaseException) -> None:
        self._leave()

    def _leave(self) -> None:
        for mode in reversed(self.modes):
            mode.__exit__(None, None, None)
        self.modes = []


class _Busy(RegressionTask):
    """Logs in every way a step can, with a schedule per step and two optimizers."""

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """Log several values."""
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("largest", loss.detach(), on_step=False, on_epoch=True, reduce_fx="max")
        self.log_dict({"a": loss * 2, "b": 3.0})
        return loss

    def num_items(self, batch: Batch) -> torch.Tensor:
        """Return a count that is known on the device only."""
        return batch[0].isfinite().sum()

    automatic_optimization = True  # all of its optimizers step on one loss

    def configure_optimizers(self) -> Any:
        """Return two optimizers, one with a schedule."""
        first = torch.optim.SGD(self.net[0].parameters(), lr=0.01, momentum=0.9)
        second = torch.optim.SGD(self.net[3].parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(first, 5)
        return [first, second], [{"scheduler": schedule, "interval": "step"}]


@pytest.mark.parametrize(
    "arguments",
    [{}, {"gradient_clip_val": 0.1}, {"accumulate_grad_batches": 4}, {"precision": "bf16-mixed"}],
    ids=str,
)
def test_no_tensor_is_read_between_two_flushes(arguments: dict[str, Any]) -> None:
    guard = _Forbids(last_batch=44)
    trainer = quiet_trainer(max_epochs=1, log_every_n_steps=1000, callbacks=guard, **arguments)
    trainer.fit(_Busy(), regression_loader(48))
    assert guard.guarded >= 10
