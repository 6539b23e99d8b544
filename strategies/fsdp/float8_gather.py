"""All-gather of fp8 layers' weights in float8, with the extension hooks of torch's `fully_shard`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from trainwright.strategies.fsdp.unit_state import parameter_groups
from trainwright.strategies.steps.fp8 import float8, is_converted

_OneTensor = tuple[torch.Tensor]  # fully_shard's hooks receive and return tuples of tensors


class Float8Gather:
    """All-gather of weights in float8. Each shard is cast with the scale of the full weight.

    One all-reduce before the forward of the root computes the scales of all weights. In forwards outside of a training
    step, each weight has its own all-reduce.

    Weights whose rows the number of ranks does not divide are gathered as without this class.

    Args:
        root: The root module, sharded by `fully_shard`.
        units: The units within it, sharded by `fully_shard`.
    """

    def __init__(self, root: nn.Module, units: Iterable[nn.Module]) -> None:
        self._records: list[FSDPParam] = []  # torch's records of the sharded weights
        for module in (root, *units):
            if isinstance(module, FSDPModule):
                for group in parameter_groups(module):
                    self._records += filter(_is_supported, group.fsdp_params)
        self._weights: list[Any] = list(map(_extend, self._records))  # torchao's view of each record's shard
        self._handles = [
            root.register_forward_pre_hook(self._compute_scales, prepend=True),  # before fully_shard's own hook
            root.register_forward_hook(self._forget_after_evaluation),
        ]

    # torchao's `precompute_float8_dynamic_scale_for_fsdp` for the weights of this model.
    @torch.no_grad()
    def _compute_scales(self, *_: object) -> None:
        if self._weights:
            shards = [weight._tensor for weight in self._weights]
            largest = torch.stack(torch._foreach_norm(shards, ord=torch.inf))
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._records[0].shard_mesh_from_root.get_group())
            for weight, amax in zip(self._weights, largest, strict=True):
                weight._precomputed_scale = float8().float8_utils.amax_to_scale(amax, weight._dtype)

    def _forget_after_evaluation(self, *_: object) -> None:
        if not torch.is_grad_enabled():
            self.forget_scales()  # no backward follows that needs them

    def forget_scales(self) -> None:
        """Discard the scales before the weights change. Not collective."""
        for weight in self._weights:
            weight._precomputed_scale = None

    def undo(self) -> None:
        """Remove the hooks. Not collective."""
        for handle in self._handles:
            handle.remove()
        for record in self._records:
            for name in ("fsdp_pre_all_gather", "fsdp_post_all_gather"):
                vars(record._sharded_local_tensor).pop(name, None)
        self._records = []
        self._weights = []


def _is_supported(record: FSDPParam) -> bool:
    """Return whether a parameter is the weight of an fp8 layer with as many rows on every rank."""
    info = record._module_info
    if info.param_name != "weight" or not is_converted(info.module):
        return False
    # fully_shard pads the shards of uneven weights. torchao does not pad them.
    num_ranks: int = record.shard_mesh_from_root.size()
    return record._orig_size[0] % num_ranks == 0


def _extend(record: FSDPParam) -> Any:
    """Set the hooks on a shard, and return torchao's view of it, which computes their results.

    torchao replaces the parameter by the view. Here, the parameter stays a plain tensor with the hooks as attributes,
    so that optimizers and checkpoints do not depend on torchao.
    """
    layer: Any = record._module_info.module
    shard = record._sharded_local_tensor
    dtype = layer.config.cast_config_weight.target_dtype
    weight = float8().fsdp_utils.WeightWithDynamicFloat8CastTensor(shard.detach(), layer.linear_mm_config, dtype)

    # Not every process group gathers float8, but every one gathers bytes.
    def pre_all_gather(mesh: DeviceMesh) -> tuple[_OneTensor, _OneTensor]:
        (data,), scale = weight.fsdp_pre_all_gather(mesh)
        return (data.view(torch.uint8),), scale

    def post_all_gather(
        gathered: _OneTensor, scale: _OneTensor, param_dtype: torch.dtype, *, out: object = None
    ) -> Any:
        (data,) = gathered
        result = weight.fsdp_post_all_gather((data.view(dtype),), scale, param_dtype, out=out)
        if result is None:  # it has written into `out`, which fully_shard passes from the second all-gather
            return None
        full_weight, _ = result
        return full_weight, gathered  # fully_shard frees the memory of `gathered` after the forward or backward

    vars(shard)["fsdp_pre_all_gather"] = pre_all_gather
    vars(shard)["fsdp_post_all_gather"] = post_all_gather
    record._init_extensions()  # torch reads the hooks of a shard only once, when it creates the record
    return weight
