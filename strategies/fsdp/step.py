"""The step of a model in pieces."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from trainwright.core.state import Group
from trainwright.strategies.fsdp.parallelize import ParallelModel
from trainwright.strategies.steps.step import AutomaticStep, StepParts


class ShardedStep(AutomaticStep):
    """A step whose gradients are averaged over ranks and cut while backward runs.

    Args:
        parts: what it is made of.
        model: in pieces.
    """

    def __init__(self, parts: StepParts, model: ParallelModel) -> None:
        super().__init__(parts)
        self._model = model

    def forward_backward(self, group: Group) -> torch.Tensor | None:
        total = super().forward_backward(group)
        self._model.end_group()
        return total

    def discard_gradients(self) -> None:
        holds_sums = self._model.holds_sums
        super().discard_gradients()
        if holds_sums:
            self._model.forget_sums()


class SplitStep(AutomaticStep):
    """A step of layers that are split over all ranks, which see the same data.

    Args:
        parts: what it is made of.
        laid_out: the parameters that are split, with how they lie on the ranks.
    """

    def __init__(self, parts: StepParts, laid_out: list[tuple[nn.Parameter, Any]]) -> None:
        super().__init__(parts)
        self._laid_out = laid_out

    def forward_backward(self, group: Group) -> torch.Tensor | None:
        total = super().forward_backward(group)
        self._lay_out_gradients()
        return total

    def _lay_out_gradients(self) -> None:
        """Have each gradient lie on the ranks as its parameter does.

        Of some, each rank has a part, as of those of norms over a split sequence: they are summed in one exchange. That
        of torch's split embedding is whole on every rank, where it would be counted several times.
        """
        by_dtype: dict[torch.dtype, list[Any]] = {}
        for parameter, placements in self._laid_out:
            grad: Any = parameter.grad
            if grad is None or grad.placements == placements:
                continue
            if grad.placements[0].is_partial() and placements[0].is_replicate():
                by_dtype.setdefault(grad.dtype, []).append(parameter)
            else:
                parameter.grad = grad.redistribute(placements=placements)
        for parameters in by_dtype.values():
            parts = [parameter.grad.to_local() for parameter in parameters]
            flat = torch.cat([part.reshape(-1) for part in parts])
            dist.all_reduce(flat)
            summed = torch.split(flat, [part.numel() for part in parts])
            for parameter, piece in zip(parameters, summed, strict=True):
                parameter.grad = DTensor.from_local(
                    piece.view(parameter.shape), parameter.device_mesh, parameter.placements, run_check=False
                )
