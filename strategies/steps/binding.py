"""Calls of user-defined methods, with the arguments that the methods accept."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.core.errors import ConfigurationError
from trainwright.core.signatures import arguments_of, bind, method_of
from trainwright.core.task import TaskModule
from trainwright.core.tree import map_tensors
from trainwright.strategies.precision import Precision
from trainwright.strategies.steps.loss_scale import LossScale


def bind_step(task: TaskModule, name: str, wrapper: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return a function that calls one of the task's steps with only the arguments that the step accepts.

    Args:
        task: The task.
        name: `"training_step"`, with `(batch, batch_idx)`, or an evaluation step, which may also get `dataloader_idx`.
        wrapper: `wrapper(name, *args)` runs the step through an engine. None calls the method directly.
    """
    call = None if wrapper is None else functools.partial(wrapper, name)
    return bind(method_of(task, name), name, arguments_of(TaskModule, name), call)


def need_closure(optimizers: Iterable[Optimizer], precision: Precision) -> bool:
    """Return whether one of the optimizers requires a closure, as L-BFGS does.

    Raises:
        ConfigurationError: An optimizer requires a closure, and the precision uses loss scaling.
    """
    is_needed = False
    for optimizer in optimizers:
        cls = type(optimizer)
        closure = inspect.signature(cls.step).parameters.get("closure")
        if closure is None or closure.default is not inspect.Parameter.empty:
            continue
        if precision.scaled:
            raise ConfigurationError(
                f"precision={precision.name!r} uses loss scaling, which does not work with {cls.__name__}: it "
                "evaluates the loss several times in a step. Use precision='32-true' or 'bf16-mixed'."
            )
        is_needed = True
    return is_needed


def defines_itself(owner: object, name: str) -> bool:
    """Return whether the class of a data module, or a base class outside of this package, defines the hook `name`."""
    for cls in type(owner).__mro__:
        if name in vars(cls):
            return not cls.__module__.startswith("trainwright.")
    return False


class ScaledOptimizer:
    """The optimizer that is passed to a task's `optimizer_step` with loss scaling. It skips steps with overflow.

    All attributes except `step` are those of the optimizer. `isinstance` is True for the optimizer's class.

    Args:
        optimizer: The optimizer, whose gradients are already unscaled.
        scale: The loss scale.
    """

    def __init__(self, optimizer: Optimizer, scale: LossScale) -> None:
        self.optimizer = optimizer
        self._scale = scale

    @property
    def __class__(self) -> Any:
        return type(self.optimizer)

    @__class__.setter
    def __class__(self, value: object) -> None:
        raise AttributeError("the class of a wrapped optimizer cannot be changed")

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Step unless a gradient is not finite. Return the closure's loss, or None without a closure."""
        self._scale.step(self.optimizer, **options)  # without the closure, which `GradScaler.step` does not accept
        return None if closure is None else closure()

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not set yet, while the object is copied
            raise AttributeError(name)
        return getattr(self.optimizer, name)


def outputs_of(output: object) -> dict[str, Any]:
    """Return the `outputs` of `on_train_batch_end`, without references to the graph or to buffers of the step.

    Args:
        output: The result of `training_step`. A loss tensor is returned as `{"loss": …}`. None, for a skipped
            micro-batch, is returned as an empty dict. Any other value that is not a mapping is returned as `{"output":
            …}`.

    Returns:
        A dict whose tensors are detached. The loss is copied, because compiled steps reuse its memory. The loss is not
        weighted, and not divided by the number of micro-batches.
    """
    if output is None:
        return {}
    if isinstance(output, torch.Tensor):
        return {"loss": output.detach().clone()}
    if not isinstance(output, Mapping):
        return {"output": map_tensors(torch.Tensor.detach, output)}
    detached = {name: map_tensors(torch.Tensor.detach, value) for name, value in output.items()}
    if isinstance(detached.get("loss"), torch.Tensor):
        detached["loss"] = detached["loss"].clone()
    return detached


class StepModule(nn.Module):
    """Module whose forward calls `task.<step>(*args)`.

    Args:
        task: The task. Its parameters keep their names in `task.state_dict()`.
    """

    def __init__(self, task: TaskModule) -> None:
        super().__init__()
        self.task = task

    def forward(self, step: str | Callable[..., Any], *args: object, **kwargs: object) -> Any:
        """Run a step by its name, for example `"training_step"`, or a function."""
        method = getattr(self.task, step) if isinstance(step, str) else step
        return method(*args, **kwargs)
