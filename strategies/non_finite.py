"""Whether a step's loss and gradients are numbers at all: a strategy's answer, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.core.state import Group
from trainwright.core.task import TaskModule
from trainwright.strategies.gradients import parameters_of


@dataclass(frozen=True, slots=True)
class NonFinite:
    """What one rank sees of a step that is not finite.

    Attributes:
        loss: this rank's weighted loss of the group.
        parameters: names of the parameters whose gradients hold a NaN or an infinity, in the task's order.
    """

    loss: float
    parameters: list[str]


class FiniteCheck:
    """What a strategy does for runs that look at a step before it changes weights; a part of `Strategy`."""

    task: TaskModule
    optimizers: list[Optimizer]
    _scaler: torch.amp.GradScaler | None
    _group: Group | None
    _loss: torch.Tensor | None
    _zeroed: bool

    def is_finite(self, loss: torch.Tensor) -> bool:
        """Tell, between `forward_backward` and `optimizer_step`, whether loss and gradients are finite on every rank.

        With a scaled loss only the loss is looked at: gradients that overflow are the scaler's to find, and are part
        of its search for a scale.

        Args:
            loss: what `forward_backward` returned.

        Collective; waits for the device, to read one flag.
        """
        finite = loss.isfinite()
        if self._scaler is None:
            finite = finite & self._largest_gradient().isfinite()
        return not self._sum_over_ranks((~finite).float()).item()

    def explain_non_finite(self, loss: torch.Tensor) -> NonFinite:
        """Say what this rank sees of a step for which `is_finite` was False. Not collective; reads the device."""
        stepped = {id(parameter) for parameter in parameters_of(self.optimizers)}
        names, flags = [], []
        for name, parameter in self.task.named_parameters():
            grad = parameter.grad
            if grad is not None and id(parameter) in stepped:
                names.append(name)
                flags.append(self._gradient_values(grad).isfinite().all().to(loss.device))
        finite = torch.stack(flags).tolist() if flags else []
        return NonFinite(float(loss), [name for name, good in zip(names, finite, strict=True) if not good])

    def drop_group(self) -> None:
        """Forget a group after `forward_backward`: no optimizer steps, and the loss scale stays as it is."""
        self.discard_gradients()
        if self._scaler is not None:
            self._scaler.update(self._scaler.get_scale())  # the same one: only forgets that gradients were unscaled

    def discard_gradients(self) -> None:
        """Forget the gradients of a group that will not be stepped."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self._group = self._loss = None
        self._zeroed = True

    def _sum_over_ranks(self, value: torch.Tensor) -> torch.Tensor:
        """Sum a 0-dim device tensor over data-parallel ranks, without reading it."""
        return value

    def _largest_gradient(self) -> torch.Tensor:
        """Return the largest absolute element of this rank's gradients, 0-dim, on the device.

        The maximum, unlike the 2-norm, is finite exactly when all elements are, also where their squares overflow.
        """
        grads = [self._gradient_values(p.grad) for p in parameters_of(self.optimizers) if p.grad is not None]
        return nn.utils.get_total_norm([grad for grad in grads if grad.numel()], float("inf"))

    def _gradient_values(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the elements of a gradient that this rank holds. Not collective."""
        return grad.coalesce().values() if grad.is_sparse else grad
