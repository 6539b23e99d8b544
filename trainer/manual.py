"""Manual optimization: backward, synchronization and clipping that the task calls itself."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.optim import Optimizer

from trainwright.core.errors import ConfigurationError, TaskError
from trainwright.strategies.engine import Engine
from trainwright.strategies.steps.gradients import GradientClip, parameters_of
from trainwright.strategies.steps.manual_step import ManualStep
from trainwright.trainer.configuration.arguments import TrainerArguments
from trainwright.trainer.hooks import StageHooks
from trainwright.trainer.optimization import ManualOptimizer


class ManualOptimization:
    """Methods that a task with `automatic_optimization = False` calls in its training step.

    `task_optimizers` and `clip_gradients` also serve tasks with automatic optimization.

    Args:
        arguments: provides the Trainer's clipping.
        engine: computes gradients.
        hooks: provides the task.
    """

    def __init__(self, arguments: TrainerArguments, engine: Engine, hooks: StageHooks) -> None:
        self._arguments = arguments
        self._engine = engine
        self._hooks = hooks

    def task_optimizers(self) -> Sequence[Any]:
        """Return the optimizers for the task: with manual optimization each is wrapped in a `ManualOptimizer`."""
        optimizers: list[Optimizer] = self._engine.optimizers
        if self._hooks.task.automatic_optimization:
            return optimizers
        return [ManualOptimizer(optimizer, self._engine) for optimizer in optimizers]

    def _step(self) -> ManualStep:
        step = self._engine.step
        assert isinstance(step, ManualStep)  # the callers check that the task uses manual optimization
        return step

    def manual_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward for a task with manual optimization. Collective with several processes, except in
        `no_sync`.

        Args:
            loss: the loss.
            *args, **kwargs: further arguments of `TaskModule.backward`.

        Raises:
            TaskError: the task uses automatic optimization.
        """
        task = self._hooks.task
        if task.automatic_optimization:
            raise TaskError(
                f"{type(task).__name__} calls manual_backward, but automatic_optimization is True. Set "
                "self.automatic_optimization = False in __init__, or return the loss instead."
            )
        self._step().backward(loss, *args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which `manual_backward` does not synchronize gradients.

        Raises:
            TaskError: the task uses automatic optimization.
        """
        task = self._hooks.task
        if task.automatic_optimization:
            raise TaskError(
                f"{type(task).__name__} calls no_sync, but automatic_optimization is True. Gradients are already "
                "synchronized only in the last micro-batch of a step. Use Trainer(accumulate_grad_batches=...)."
            )
        return self._step().no_sync()

    def clip_gradients(self, optimizer: Optimizer, max_value: float | None, algorithm: str | None) -> None:
        """Clip the gradients of one optimizer's parameters; see `TaskModule.clip_gradients`.

        Raises:
            ConfigurationError: an argument is invalid, or differs from the Trainer's.
        """
        arguments = self._arguments
        clip = GradientClip.parse(
            _only_value("gradient_clip_val", max_value, arguments.gradient_clip_val),
            _only_value("gradient_clip_algorithm", algorithm, arguments.gradient_clip_algorithm),
        )
        if clip is None:
            return
        step = self._engine.step
        if isinstance(step, ManualStep):  # it may have to divide the gradients by the loss scale first
            if isinstance(optimizer, ManualOptimizer):
                optimizer = optimizer.optimizer
            step.clip_gradients(optimizer, clip)
        else:  # gradients of an automatic step are divided by the loss scale before a hook can clip them
            self._engine.gradients.clip(parameters_of([optimizer]), clip)


def _only_value(name: str, value: Any, of_trainer: Any) -> Any:
    """Return an argument of `clip_gradients`, or the Trainer's if it is None. They may not contradict each other."""
    if value is None:
        return of_trainer
    if of_trainer is not None and value != of_trainer:
        raise ConfigurationError(
            f"clip_gradients received {name}={value!r}, but the Trainer has {name}={of_trainer!r}. Remove one of them."
        )
    return value
