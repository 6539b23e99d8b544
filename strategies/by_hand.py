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
from trainwright.strategies.step_outputs import outputs_of


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

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """What scales losses of 16-bit mixed precision, once there are optimizers; None otherwise."""
        return self._scaler

    @property
    def begun_by_hand(self) -> bool:
        """Whether an optimizer has begun to step in the present group, or the last one, of such a task."""
        return self._watch.begun

    def _run_by_hand(self, group: Group) -> None:
        self._watch.begun = False
        self._watch.stepped = not self.optimizers  # without an optimizer there is nothing else to count by
        for i, batch in enumerate(group.batches):
            group.index, idx = i, group.first_idx + i
            if self._transfer is not None:
                batch = self._transfer(batch)
            self.sink.batch = batch
            for hook in self.hooks.on_train_batch_start:
                if hook(self.run, self.task, batch, idx) == -1:
                    raise SkipRestOfEpoch
            with self._context or nullcontext():
                output = self._training_step(batch, idx)
            if self.hooks.on_train_batch_end:
                group.last_output, group.last_batch = outputs_of(output), batch
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

    def manual_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **own: Any) -> Any:
        """Step one optimizer for a task that optimizes manually.

        Gradients are unscaled and hooks called before it steps: with a closure after each of its calls, since it makes
        the gradients.

        Args:
            optimizer: to be stepped.
            closure: computes the loss and runs backward.
            **own: further arguments of its `step`.
        """
        if self._scaler is not None:  # its step takes no closure
            loss = None if closure is None else closure()
            self._scaler.unscale_(optimizer)
            self._announce_step(optimizer)
            result = self._scaler.step(optimizer, **own)
            self._scaler.update()
            return result if closure is None else loss
        if closure is None:
            self._announce_step(optimizer)
            return optimizer.step(**own)

        def closed() -> Any:
            loss = closure()
            self._announce_step(optimizer)
            return loss

        return optimizer.step(closed, **own)

    def _announce_step(self, optimizer: Optimizer) -> None:
        for hook in self.hooks.on_before_optimizer_step:
            hook(self.run, self.task, optimizer)
        self._watch.begun = True
