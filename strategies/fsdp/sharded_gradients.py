"""Sharded gradients: norms, clipping, accumulation and the loss scale."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from trainwright.strategies.fsdp.parallelize import ParallelModel
from trainwright.strategies.shards import local_shard
from trainwright.strategies.steps.gradients import GradientClip, Gradients, clip_shards, free_gradients


class ShardedGradients(Gradients):
    """The gradients of models that are sharded or whose layers are split.

    The last backward of a step reduce-scatters the gradients of each unit. Until then, each rank accumulates full
    gradients outside of `parameter.grad`.

    Attributes:
        models: All models that the engine has prepared.
    """

    accumulates_elsewhere = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.models: list[ParallelModel] = []

    def stored(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        shards: dict[int, torch.Tensor] = {}  # by id of the gathered parameter, which is not the shard
        for model in self.models:
            shards.update(model.shards_of_gathered())
        return [shards.get(id(parameter), parameter) for parameter in parameters]

    def make_scaler(self, **options: Any) -> torch.amp.GradScaler:
        return ShardScaler(self.device.type, **options)

    def complete(self) -> None:
        for model in self.models:
            model.end_group()

    @torch.no_grad()
    def clip(self, parameters: Iterable[torch.Tensor], clip: GradientClip) -> torch.Tensor | None:
        counted: dict[int, bool] = {}
        for model in self.models:
            counted.update(model.counted)
        # Parameters that belong to no model are not sharded: every rank holds the full gradient, and rank 0 counts it.
        is_main = not dist.is_initialized() or dist.get_rank() == 0
        shards: list[tuple[torch.Tensor, bool]] = []
        for parameter in parameters:
            if parameter.grad is not None:
                shards.append((local_shard(parameter.grad), counted.get(id(parameter), is_main)))
        return clip_shards(shards, clip, self.device)

    def scale(self, parameters: Iterable[torch.Tensor], factor: float | torch.Tensor) -> None:
        parameters = list(parameters)
        ids = set(map(id, parameters))
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        # `parameters` may contain gathered parameters, as between forward and backward. Their gradients are not in
        # `parameter.grad`: with `sync_each_batch` the shards have reduced gradients (`reduced`), and otherwise torch
        # accumulates full gradients (`sums`).
        for model in self.models:
            for owners, grad in (*model.reduced(), *model.sums()):
                if ids & owners:
                    grads.append(grad)
        by_id = {id(grad): grad for grad in grads}  # scales a gradient once that is in several of these
        for grad in by_id.values():
            local_shard(grad).mul_(factor)

    def free(self, parameters: Iterable[torch.Tensor]) -> bool:
        parameters = list(parameters)
        ids = set(map(id, parameters))
        had_sums = False
        for model in self.models:
            has_sums = any(ids & owners for owners, _ in model.sums())
            # A step that was interrupted may leave torch's units between forward and backward, also without gradients.
            # `forget_sums` resets them. The keys of `counted` are the ids of all parameters of the model.
            may_have_sums = model.holds_sums and not ids.isdisjoint(model.counted)
            if has_sums or may_have_sums:
                model.forget_sums()
            had_sums |= has_sums
        return free_gradients(parameters) or had_sums


class ShardScaler(torch.amp.GradScaler):
    """Loss scaler that skips a step on all ranks if a gradient has overflowed in the shard of any rank."""

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        # Torch's method passes all gradients to one operator, which does not accept tensors of several meshes.
        flags: dict[torch.device, torch.Tensor] = {}  # one element on the device: 1 if a gradient is infinite or NaN
        by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                grad = local_shard(parameter.grad)
                if grad.dtype == torch.float16 and not allow_fp16:
                    raise ValueError("Attempting to unscale FP16 gradients.")
                by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
        for (device, _), grads in by_kind.items():
            flag = flags.setdefault(device, found_inf.to(device, copy=True))
            torch._amp_foreach_non_finite_check_and_unscale_(grads, flag, inv_scale.to(device))
        return flags

    def unscale_(self, optimizer: Optimizer) -> None:
        """Unscale this rank's shards of gradients, and exchange whether any rank's shard has overflowed. Collective.

        With gradients on the host (`cpu_offload`), the exchange blocks on the device.
        """
        super().unscale_(optimizer)
        flags: dict[Any, torch.Tensor] = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        assert self._scale is not None  # checked by torch
        for flag in flags.values():
            shared = flag.to(self._scale.device)  # `flag` itself if it is on this device
            dist.all_reduce(shared, op=dist.ReduceOp.MAX)
            if shared is not flag:
                flag.copy_(shared)
