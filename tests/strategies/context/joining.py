"""The full sequence from the parts of all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.strategies.context.split import Order, positions, split_sequence


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: Any, order: Order) -> Tensor:
        ctx.dim, ctx.group, ctx.order = dim, group, order
        size = dist.get_world_size(group)
        here = positions(tensor.shape[dim] * size, group, order)
        parts, places = ([torch.empty_like(one) for _ in range(size)] for one in (tensor, here))
        dist.all_gather(parts, tensor.contiguous(), group=group)
        dist.all_gather(places, here, group=group)
        return torch.cat(parts, dim).index_select(dim, torch.cat(places).argsort())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        gradient = gradients[0].contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return split_sequence(gradient, ctx.dim, ctx.group, ctx.order), None, None, None


def join_sequence(tensor: Tensor, dim: int, group: Any, order: Order) -> Tensor:
    """Return the full tensor on every rank. Its gradient is summed over the ranks."""
    joined: Tensor = _Join.apply(tensor, dim, group, order)  # type: ignore[no-untyped-call]  # untyped in torch
    return joined
