"""Padding of evaluations in which all ranks run the same number of steps.

A rank without a batch repeats the communication of a step, because the other ranks wait for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from trainwright.core.run import Run
from trainwright.core.task import TaskModule, logging_into
from trainwright.core.tree import Batch, map_tensors, restore_attributes
from trainwright.loggers.metric_buffer import MetricBuffer
from trainwright.loggers.metric_slot import is_metric_object
from trainwright.loggers.metric_values import same_metric_objects
from trainwright.strategies.steps.step import Step


class StepCalls:
    """Record of the calls of an evaluation step that may communicate: of the task, its modules and `all_gather`.

    Attributes:
        can_repeat: a step was recorded, and gradients were disabled in all its calls. Otherwise its backward may
            communicate too, which is not recorded.
    """

    def __init__(self) -> None:
        self.can_repeat = False
        self._calls: list[Callable[[], object]] = []  # with their detached arguments, in order
        self._is_nested = False  # within a recorded call, whose inner calls `repeat` makes again anyway

    @contextlib.contextmanager
    def record(self, task: TaskModule, trainer: Run) -> Iterator[None]:
        """Record the outermost calls of the running step and discard those of the previous step."""
        self._calls = []
        self.can_repeat = True
        with contextlib.ExitStack() as undo:
            # `nn.Module.__call__` runs `_compiled_call_impl` if it is set. Hooks would miss calls of compiled modules.
            for module in dict.fromkeys((task, *_modules_below(task))):
                call = module._compiled_call_impl or module._call_impl
                undo.enter_context(_attribute(module, "_compiled_call_impl", partial(self._run, call)))
            undo.enter_context(_attribute(trainer, "all_gather", partial(self._run, trainer.all_gather)))
            yield

    def _run(self, call: Callable[..., Any], *args: object, **options: object) -> Any:
        """Make a call, and record it if it is not within a recorded one."""
        if self._is_nested:
            return call(*args, **options)
        self.can_repeat = self.can_repeat and not torch.is_grad_enabled()
        detached_args = map_tensors(torch.detach, args)
        detached_options = map_tensors(torch.detach, options)
        self._calls.append(partial(call, *detached_args, **detached_options))
        self._is_nested = True
        try:
            return call(*args, **options)
        finally:
            self._is_nested = False

    def repeat(self, *_: object) -> None:
        """Make the recorded calls again."""
        for call in self._calls:
            call()


def replay_batch(
    task: TaskModule,
    step: Step,
    kind: Literal["validate", "test", "predict"],
    method: str,
    batch: Batch,
    idx: int,
    dataloader_idx: int | None,
    calls: StepCalls,
) -> None:
    """Repeat the communication of an evaluation step without results: nothing is logged and no hook is called.

    The recorded calls of this rank's last step run again. If they cannot be repeated, the step itself runs. The task's
    metric objects and its attributes that hold numbers, tensors and containers are restored afterwards.

    Args:
        task: the task.
        step: computes the task's steps.
        kind: `"validate"`, `"test"` or `"predict"`.
        method: name of the task's method.
        batch: any batch, on the host.
        idx: batch index.
        dataloader_idx: loader index; None with a single loader.
        calls: recorded calls of this rank's last batch of this loader.
    """
    unread = MetricBuffer()
    unread.begin(kind, num_dataloaders=(dataloader_idx or 0) + 1)
    unread.in_step = True
    with logging_into(task, unread), same_metric_objects(task.modules()):
        if calls.can_repeat:
            step.evaluate(calls.repeat, batch, idx, dataloader_idx)
            return
        with restore_attributes(task, vars(TaskModule()).keys()):
            unread.batch = step.to_device(batch, dataloader_idx or 0)
            step.evaluate(method, unread.batch, idx, dataloader_idx)


def _modules_below(module: nn.Module) -> Iterator[nn.Module]:
    """Yield submodules whose calls may communicate, without those inside compiled modules."""
    for child in module.children():
        if not is_metric_object(child):
            yield child
            if child._compiled_call_impl is None and not hasattr(child, "_orig_mod"):
                yield from _modules_below(child)


@contextlib.contextmanager
def _attribute(owner: object, name: str, value: object) -> Iterator[None]:
    """Set an instance's attribute within the context."""
    attributes = vars(owner)
    had_attribute = name in attributes
    old_value = attributes.get(name)
    attributes[name] = value
    try:
        yield
    finally:
        del attributes[name]
        if had_attribute:
            attributes[name] = old_value
