"""The scale of a float16 loss, agreed over ranks that each see a piece of the gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer


class ShardScaler(torch.amp.GradScaler):
    """Leaves a step out on all ranks when a gradient has overflowed in the piece of any."""

    def unscale_(self, optimizer: Optimizer) -> None:
        """Unscale this rank's pieces and agree on whether any overflowed. Collective; does not wait for the device."""
        super().unscale_(optimizer)
        found: dict[Any, torch.Tensor] = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        for flag in found.values():
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
