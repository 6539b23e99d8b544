"""The steps of a task with manual optimization."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.optim import Optimizer

from trainwright.core.state import Group
from trainwright.strategies.steps.gradients import GradientClip, parameters_of
from trainwright.strategies.steps.phase import Phase
from trainwright.strategies.steps.step import Step, StepParts


class ManualStep(Step):
    """A step with manual optimization: `training_step` runs backward and steps the optimizers itself.

    Args:
        parts: See `StepParts`.
        average: Averages gradients over ranks after each backward. Default: None, which calls `Gradients.complete`.
    """

    def __init__(self, parts: StepParts, average: Callable[[], None] | None = None) -> None:
        super().__init__(parts)
        # None if nothing is left to average after a backward.
        self._average = self._complete if average is None else average
        self._is_in_no_sync = False
        self._handles = [optimizer.register_step_post_hook(self._record_step) for optimizer in parts.optimizers]

    def _record_step(self, *_: object) -> None:
        self.stepped = True

    def forward_backward(self, group: Group) -> torch.Tensor | None:
        # `_record_step` sets it to True. Without an optimizer, every group counts as a step.
        self.stepped = not self.optimizers
        loss = super().forward_backward(group)
        if self._scale is not None:
            self._scale.update()
        if self._finish is not None:
            self._finish(self._last_idx, True)
        return loss

    def _run_batch(self, batch: Any, idx: int, weight: Any, num: int) -> tuple[Any, torch.Tensor | None]:
        with self._context or nullcontext():
            return self._training_step(batch, idx), None

    def _skip_batches(self, skipped: list[int], group: Group, weights: Any, total: Any) -> Any:
        return None  # the task handles its own losses

    def optimizer_step(self, clip: GradientClip | None) -> torch.Tensor | None:
        return None  # `training_step` has stepped the optimizers

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward for `TaskModule.manual_backward`. Collective with several data-parallel ranks."""
        if self._scale is not None:
            # Several optimizers may step after one another: the scale changes only before the backward after them.
            loss = self._scale.scale(loss, starts_group=True)
        for hook in self.hooks.on_before_backward:
            hook(self.run, self.task, loss)
        self.task.backward(loss, *args, **kwargs)
        if self._average is not None and not self._is_in_no_sync:
            self._average()
        for hook in self.hooks.on_after_backward:
            hook(self.run, self.task)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without averaging them over ranks. Not collective.

        The next `backward` outside of the context averages the accumulated gradients. Every rank must run the same
        backward passes in the context.
        """
        was_in_no_sync = self._is_in_no_sync  # True in a nested context
        self._is_in_no_sync = True
        try:
            yield
        finally:
            self._is_in_no_sync = was_in_no_sync

    def step_optimizer(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Step one optimizer.

        Gradients are unscaled and hooks are called before the step, or with a closure after each call of the closure.

        Args:
            optimizer: The optimizer.
            closure: Computes the loss and runs backward. Default: None.
            **options: Further arguments of the optimizer's `step`.

        Returns:
            The result of the optimizer's `step`. With loss scaling, the loss of the closure, or None.
        """
        if self._scale is not None:  # GradScaler.step does not accept a closure
            loss = None if closure is None else closure()
            self._scale.unscale(optimizer)
            self._begin_optimizer_step(optimizer)
            self._scale.step(optimizer, **options)
            return loss
        if closure is None:
            self._begin_optimizer_step(optimizer)
            return optimizer.step(**options)

        def closure_with_hooks() -> Any:
            loss = closure()
            self._begin_optimizer_step(optimizer)
            return loss

        return optimizer.step(closure=closure_with_hooks, **options)

    def clip_gradients(self, optimizer: Optimizer, clip: GradientClip) -> None:
        """Clip the gradients of one optimizer's parameters, after dividing them by the loss scale."""
        if self._scale is not None:
            self._scale.unscale(optimizer)
        self.parts.gradients.clip(parameters_of([optimizer]), clip)

    def _begin_optimizer_step(self, optimizer: Optimizer) -> None:
        """Call the hooks before an optimizer step, and record that weights change from now on."""
        for hook in self.hooks.on_before_optimizer_step:
            hook(self.run, self.task, optimizer)
        self.parts.enter(Phase.WEIGHTS)
