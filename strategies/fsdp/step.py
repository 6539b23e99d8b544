"""The step of a sharded model."""

from __future__ import annotations

import torch

from trainwright.core.state import Group
from trainwright.strategies.fsdp.sharded_gradients import ShardedGradients
from trainwright.strategies.steps.step import AutomaticStep, StepParts


class ShardedStep(AutomaticStep):
    """A step whose gradients are averaged over ranks and sharded while backward runs.

    Args:
        parts: See `StepParts`.
        gradients: Of the task.
    """

    def __init__(self, parts: StepParts, gradients: ShardedGradients) -> None:
        super().__init__(parts)
        self._gradients = gradients

    def forward_backward(self, group: Group) -> torch.Tensor | None:
        total = super().forward_backward(group)
        self._gradients.complete()
        return total

    def discard_gradients(self) -> None:
        held = [model for model in self._gradients.models if model.holds_sums]
        super().discard_gradients()
        for model in held:
            model.forget_sums()
