"""How the user's own methods are called: with the arguments they take, through the wrapper if there is one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.core.errors import ConfigurationError
from trainwright.core.signatures import arguments_of, bind
from trainwright.core.task import TaskModule
from trainwright.core.tree import map_tensors
from trainwright.strategies.precision import Precision


def bind_step(task: TaskModule, name: str, wrapper: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return a caller of one of the task's steps that leaves out what the step does not take.

    Args:
        task: whose step.
        name: `"training_step"`, with `(batch, batch_idx)`, or an evaluation's, which may get `dataloader_idx` too.
        wrapper: `wrapper(name, *args)` runs the step through an engine; None calls the method itself.
    """
    call = None if wrapper is None else functools.partial(wrapper, name)
    return bind(getattr(task, name), name, arguments_of(TaskModule, name), call)


def need_closure(optimizers: Iterable[Optimizer], precision: Precision) -> bool:
    """Tell whether one of the optimizers cannot step without a closure, as L-BFGS cannot.

    Raises:
        ConfigurationError: it cannot, and the precision scales the loss.
    """
    found = [optimizer for optimizer in optimizers if _closure_is_required(optimizer)]
    if found and precision.scaled:
        raise ConfigurationError(
            f"precision={precision.name!r} scales the loss, which {type(found[0]).__name__} cannot be given because it "
            "evaluates it several times in a step. Use precision='32-true' or 'bf16-mixed'."
        )
    return bool(found)


def _closure_is_required(optimizer: Optimizer) -> bool:
    parameter = inspect.signature(type(optimizer).step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def defines_itself(owner: object, name: str) -> bool:
    """Tell whether a data module defines the transfer hook itself rather than inheriting ours."""
    for cls in type(owner).__mro__:
        if name in vars(cls):
            return not cls.__module__.startswith("trainwright.")
    return False


class ScaledOptimizer:
    """An optimizer as a task's own `optimizer_step` sees it while the loss is scaled: an overflown step is left out.

    Everything but `step` is the optimizer's own, whose class it also has for `isinstance`.

    Args:
        optimizer: its gradients are unscaled already.
        scaler: knows whether they overflowed.
    """

    def __init__(self, optimizer: Optimizer, scaler: torch.amp.GradScaler) -> None:
        self.optimizer = optimizer
        self._scaler = scaler

    @property
    def __class__(self) -> Any:
        return type(self.optimizer)

    @__class__.setter
    def __class__(self, value: Any) -> None:
        raise AttributeError("the class of a wrapped optimizer is the optimizer's")

    def step(self, closure: Callable[[], Any] | None = None, **own: Any) -> Any:
        """Step unless a gradient is not finite; returns the closure's loss."""
        self._scaler.step(self.optimizer, **own)
        return None if closure is None else closure()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


def outputs_of(output: Any) -> dict[str, Any]:
    """Return the `outputs` of `on_train_batch_end`: what keeps it keeps neither the graph nor a buffer of the step.

    Args:
        output: what `training_step` returned: the loss alone becomes `{"loss": …}`, None (the micro-batch was skipped)
            an empty dict; anything else that is not a mapping is under `"output"`.

    Returns:
        A dict whose tensors are detached. The loss is a copy, because compiled steps reuse its memory; it is not
        weighted and not divided by the number of micro-batches.
    """
    if output is None:
        return {}
    if isinstance(output, torch.Tensor):
        return {"loss": output.detach().clone()}
    if not isinstance(output, Mapping):
        return {"output": map_tensors(torch.Tensor.detach, output)}
    found = {name: map_tensors(torch.Tensor.detach, value) for name, value in output.items()}
    if isinstance(found.get("loss"), torch.Tensor):
        found["loss"] = found["loss"].clone()
    return found


class StepModule(nn.Module):
    """Calls `task.<step>(*args)` as its forward.

    Args:
        task: holds all the parameters; they keep their names in `task.state_dict()`, whatever wraps this module.
    """

    def __init__(self, task: TaskModule) -> None:
        super().__init__()
        self.task = task

    def forward(self, step: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the step called `step`, for example `"training_step"`, or a function in its place."""
        return (getattr(self.task, step) if isinstance(step, str) else step)(*args, **kwargs)
