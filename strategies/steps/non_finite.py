"""Whether a step's loss and gradients are numbers at all: the same answer on every rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from trainwright.strategies.data_ranks import DataRanks
from trainwright.strategies.steps.step import Step


@dataclass(frozen=True, slots=True)
class NonFinite:
    """What one rank sees of a step that is not finite.

    Attributes:
        loss: this rank's weighted loss of the group.
        parameters: names of the parameters whose gradients hold a NaN or an infinity, in the task's order.
    """

    loss: float
    parameters: list[str]


def is_finite(step: Step, loss: torch.Tensor, ranks: DataRanks) -> bool:
    """Tell, between `forward_backward` and `optimizer_step`, whether loss and gradients are finite on every rank.

    With a scaled loss only the loss is looked at: gradients that overflow are the scaler's to find, and are part of its
    search for a scale.

    Args:
        step: between the two.
        loss: what `forward_backward` returned.
        ranks: of the run.

    Collective; waits for the device, to read one flag.
    """
    finite = loss.isfinite()
    if step.scaler is None:
        # The largest element, unlike the 2-norm, is finite exactly when all are, also where their squares overflow.
        held = [values for _, values in step.held_gradients() if values.numel()]
        finite = finite & nn.utils.get_total_norm(held, float("inf")).to(loss.device).isfinite()
    return not ranks.sum((~finite).float()).item()


def explain(step: Step, loss: torch.Tensor) -> NonFinite:
    """Say what this rank sees of a step for which `is_finite` was False. Not collective; reads the device."""
    flags = {id(p): values.isfinite().all().to(loss.device) for p, values in step.held_gradients()}
    finite = dict(zip(flags, torch.stack([*flags.values()]).tolist() if flags else [], strict=True))
    names = [name for name, parameter in step.task.named_parameters() if not finite.get(id(parameter), True)]
    return NonFinite(float(loss), names)
