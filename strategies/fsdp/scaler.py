"""The scale of a float16 loss, agreed over ranks that each see a piece of the gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from trainwright.strategies.shards import local_piece


class ShardScaler(torch.amp.GradScaler):
    """Leaves a step out on all ranks when a gradient has overflowed in the piece of any."""

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        # Torch's own takes all gradients at once, which cannot be of several meshes, nor in pieces and whole.
        flags: dict[torch.device, torch.Tensor] = {}
        by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    grad = local_piece(parameter.grad)
                    if grad.dtype == torch.float16 and not allow_fp16:
                        raise ValueError("Attempting to unscale FP16 gradients.")
                    by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
        for (device, _), grads in by_kind.items():
            flag = flags.setdefault(device, found_inf.to(device, copy=True))
            torch._amp_foreach_non_finite_check_and_unscale_(grads, flag, inv_scale.to(device))
        return flags

    def unscale_(self, optimizer: Optimizer) -> None:
        """Unscale this rank's pieces and agree on whether any overflowed. Collective.

        Waits for the device where gradients are on the host (`cpu_offload`): ranks meet on the device.
        """
        super().unscale_(optimizer)
        found: dict[Any, torch.Tensor] = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        assert self._scale is not None  # torch has checked it
        for flag in found.values():
            shared = flag.to(self._scale.device)
            dist.all_reduce(shared, op=dist.ReduceOp.MAX)
            if shared is not flag:
                flag.copy_(shared)
