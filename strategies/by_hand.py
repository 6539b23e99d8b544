"""The step of a task that optimizes by hand: its training_step runs backward and the optimizers itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.optim import Optimizer

from trainwright.callbacks.hook_table import HookTable
from trainwright.core.run import Run
from trainwright.core.state import Group, SkipRestOfEpoch
from trainwright.core.task import TaskModule
from trainwright.strategies.binding import StepWatch


class StepByHand:
    """What a strategy does for tasks with `automatic_optimization = False`; a part of `Strategy`."""

    task: TaskModule
    run: Run
    hooks: HookTable
    sink: Any
    optimizers: list[Optimizer]
    _training_step: Callable[..., Any]
    _context: Any | None
    _transfer: Callable[..., Any] | None
    _scaler: torch.amp.GradScaler | None
    _watch: StepWatch
    _holds_back = False

    @property
    def stepped_by_hand(self) -> bool:
        """Whether an optimizer stepped during the last group, in a task that optimizes by hand."""
        return self._watch.stepped

    def _run_by_hand(self, group: Group) -> None:
        self._watch.stepped = not self.optimizers  # without an optimizer there is nothing else to count by
        for i, batch in enumerate(group.batches):
            idx = group.first_idx + i
            if self._transfer is not None:
                batch = self._transfer(batch)
            self.sink.batch = batch
            for hook in self.hooks.on_train_batch_start:
                if hook(self.run, self.task, batch, idx) == -1:
                    raise SkipRestOfEpoch
            with self._context or nullcontext():
                output = self._training_step(batch, idx)
            if self.hooks.on_train_batch_end:
                group.last_output, group.last_batch = output, batch
        self.sink.batch = None

    def manual_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward for a task that optimizes by hand. Collective under strategies that join processes."""
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        for hook in self.hooks.on_before_backward:
            hook(self.run, self.task, loss)
        self.task.backward(loss, *args, **kwargs)
        if not self._holds_back:
            self._average_gradients()
        for hook in self.hooks.on_after_backward:
            hook(self.run, self.task)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave the gradients of manual backward passes where they are, until one outside of it. Not collective.

        The next `manual_backward` after it averages what has been added up. Every rank must hold back the same passes.
        """
        before, self._holds_back = self._holds_back, True
        try:
            yield
        finally:
            self._holds_back = before

    def _average_gradients(self) -> None:
        """Average the gradients that a manual backward left over ranks."""

    def manual_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        """Step one optimizer for a task that optimizes by hand: unscales and tells the listeners first."""
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)
        for hook in self.hooks.on_before_optimizer_step:
            hook(self.run, self.task, optimizer)
        if self._scaler is None:
            return optimizer.step() if closure is None else optimizer.step(closure)
        result = self._scaler.step(optimizer)
        self._scaler.update()
        return result
