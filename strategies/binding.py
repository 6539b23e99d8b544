"""How the user's own methods are called: with the arguments they want, through the wrapper if there is one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer


def bind_step(
    step: Callable[..., Any], name: str, wrapper: Callable[..., Any] | None, *, num_arguments: int
) -> Callable[..., Any]:
    """Return a caller of one of the task's steps that takes `num_arguments` arguments and drops those it does not want.

    Args:
        step: the task's own method.
        name: what it is called, for the wrapper.
        wrapper: `wrapper(name, *args)` runs the step through an engine; None calls the method itself.
        num_arguments: 2 (batch, batch_idx) or 3 (… and dataloader_idx).
    """
    call = step if wrapper is None else functools.partial(wrapper, name)
    wanted = _positional(step)
    if wanted >= num_arguments:
        return call
    return lambda *args: call(*args[:wanted])


def _positional(step: Callable[..., Any]) -> int:
    """Return how many of (batch, batch_idx, dataloader_idx) a step of the task takes."""
    parameters = list(inspect.signature(step).parameters.values())
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return 3
    return min(sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters), 3)


def needs_closure(optimizer: Optimizer) -> bool:
    """Tell whether an optimizer's step cannot go without a closure, as L-BFGS's cannot."""
    parameter = inspect.signature(type(optimizer).step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def defines_itself(owner: object, name: str) -> bool:
    """Tell whether a data module defines the transfer hook itself rather than inheriting ours."""
    for cls in type(owner).__mro__:
        if name in vars(cls):
            return not cls.__module__.startswith("trainwright.")
    return False
