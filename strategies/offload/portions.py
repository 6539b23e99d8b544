"""One step of an optimizer made of several: a part of its parameters after the other, to the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.optim import optimizer as of_torch

from trainwright.strategies.offload.streaming import Unit


@dataclass(frozen=True, slots=True)
class Portion:
    """What steps at once.

    Attributes:
        parameters: with gradients, all of one optimizer.
        unit: that they lie in; None: in none.
    """

    parameters: list[nn.Parameter]
    unit: Unit | None = None


def can_be_split(optimizer: Optimizer) -> bool:
    """Tell whether several steps of some parameters each do what one of all does, and nobody would notice.

    So it is with torch's own optimizers but L-BFGS: what they do to a parameter depends on its own gradient and state.
    Of others, sub-classes of those with a step of their own included, nothing is known: what they share between
    parameters (a norm, a step size, a count of calls) would differ. Whoever has put hooks on the step would see each.
    """
    listeners = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        of_torch._global_optimizer_pre_hooks,
        of_torch._global_optimizer_post_hooks,
    )
    of_torchs_own = type(optimizer).step.__module__.startswith("torch.optim.") and not isinstance(optimizer, LBFGS)
    return of_torchs_own and not any(listeners)


def portions_of(optimizer: Optimizer, units: Sequence[Unit] | None) -> list[Portion]:
    """Return what of an optimizer has gradients, unit by unit, or each parameter by itself where there are none."""
    left = dict.fromkeys(p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    found = []
    for unit in units or ():
        own = [parameter for parameter in unit.parameters if parameter in left]
        for parameter in own:
            del left[parameter]
        if own:
            found.append(Portion(own, unit))
    return found + [Portion([parameter]) for parameter in left]


def step_in_portions(
    optimizer: Optimizer,
    portions: Sequence[Portion],
    *,
    before: Callable[[Portion, Iterator[torch.Tensor]], Any],
    after: Callable[[Portion], Any],
    step: Callable[[], Any] | None = None,
) -> None:
    """Step one portion after the other: an optimizer skips what has no gradient.

    Also after an exception every parameter has its gradient.

    Args:
        optimizer: `can_be_split`.
        portions: all that have gradients.
        before: called before each portion's turn, with what the step of the next one will read.
        after: called after each portion's step.
        step: called for each portion. Default: None, which is `optimizer.step`.
    """
    step = optimizer.step if step is None else step
    gradients = {parameter: parameter.grad for portion in portions for parameter in portion.parameters}
    for parameter in gradients:
        parameter.grad = None
    try:
        for portion, following in zip(portions, [*portions[1:], Portion([])], strict=True):
            before(portion, _touched(optimizer, following.parameters, gradients))
            for parameter in portion.parameters:
                parameter.grad = gradients[parameter]
            step()
            after(portion)
            for parameter in portion.parameters:
                parameter.grad = None
    finally:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient


def _touched(optimizer: Optimizer, parameters: list[nn.Parameter], gradients: Any) -> Iterator[torch.Tensor]:
    """Yield what a step of the parameters reads: them, their gradients and their state."""
    for parameter in parameters:
        yield parameter.data
        yield gradients[parameter]
        yield from (value for value in optimizer.state.get(parameter, {}).values() if isinstance(value, torch.Tensor))
