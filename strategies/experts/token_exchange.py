"""Exchange of tokens between ranks that hold different experts, and the gather of one rank's experts.

Sources: Lepikhin et al., "GShard" (2020); Rajbhandari et al., "DeepSpeed-MoE" (2022).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Computes `(tokens, width)`, the experts `(tokens, 1)` and the weights `(tokens, 1)` into `(tokens, width)`."""

_all_gather: Callable[..., object]
_reduce_scatter: Callable[..., object]
if hasattr(dist, "all_gather_single"):
    _all_gather, _reduce_scatter = dist.all_gather_single, dist.reduce_scatter_single
else:  # before torch 2.13
    _all_gather, _reduce_scatter = dist.all_gather_into_tensor, dist.reduce_scatter_tensor


def exchange(
    tokens: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    *,
    num_experts: int,
    group: dist.ProcessGroup,
    compute: Compute,
) -> torch.Tensor:
    """Return the weighted sum of each token's experts, which other ranks may compute. Collective in the group.

    Gradients flow back in the same way. Waits for the device once, to read how many tokens go to each rank.

    Args:
        tokens: `(tokens, width)`, of this rank. The number of tokens may differ between ranks.
        experts: `(tokens, k)`, integers: the experts of each token.
        weights: `(tokens, k)`: the weight of each of them.
        num_experts: The number of experts of all ranks, which is divisible by the size of the group.
        group: Its rank r holds the experts from `r * num_experts / size` on.
        compute: Computes the tokens of the experts of this rank, numbered from 0.
    """
    size, top_k = group.size(), experts.shape[-1]
    chosen = experts.reshape(-1)
    order = chosen.argsort(stable=True)
    to_send = chosen.bincount(minlength=num_experts)
    to_receive = torch.empty_like(to_send)
    dist.all_to_all_single(to_receive, to_send, group=group)
    counts = torch.stack([to_send, to_receive]).view(2, size, -1)
    sent, received = counts.sum(-1).tolist()
    inputs = _exchanged(tokens[order // top_k], received, sent, group)
    own = torch.arange(num_experts // size, device=tokens.device).repeat(size)
    own = own.repeat_interleave(to_receive, output_size=len(inputs)).unsqueeze(1)
    outputs = compute(inputs, own, weights.new_ones(own.shape))
    returned = _exchanged(outputs, sent, received, group)[order.argsort()]
    summed = (returned.view(*experts.shape, -1) * weights.unsqueeze(-1)).sum(1)
    return summed.to(tokens.dtype)


def _exchanged(rows: torch.Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    found: torch.Tensor = _AllToAll.apply(rows, received, sent, group)  # type: ignore[no-untyped-call]  # torch has no types here
    return found


class _AllToAll(torch.autograd.Function):
    """Sends rows to the ranks of a group."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.received, ctx.sent, ctx.group = received, sent, group
        found = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(found, rows.contiguous(), received, sent, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (grad,) = grads
        found = grad.new_empty(sum(ctx.sent), *grad.shape[1:])
        dist.all_to_all_single(found, grad.contiguous(), ctx.sent, ctx.received, group=ctx.group)
        return found, None, None, None


class GatherExperts(torch.autograd.Function):
    """Gathers the experts of a rank, which are sharded along the first dimension over the ranks that share them.

    The gradient is summed over these ranks and divided by `divisor`, in the dtype of the shard.
    """

    @staticmethod
    def forward(
        ctx: Any, shard: torch.Tensor, group: dist.ProcessGroup | None, dtype: torch.dtype, divisor: int
    ) -> torch.Tensor:
        ctx.group, ctx.dtype, ctx.divisor = group, shard.dtype, divisor
        shard = shard.to(dtype)
        if group is None:
            return shard.view_as(shard)
        found = shard.new_empty(group.size() * shard.shape[0], *shard.shape[1:])
        _all_gather(found, shard.contiguous(), group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        grad = grads[0].to(ctx.dtype) / ctx.divisor
        if ctx.group is None:
            return grad, None, None, None
        found = grad.new_empty(grad.shape[0] // ctx.group.size(), *grad.shape[1:])
        _reduce_scatter(found, grad.contiguous(), group=ctx.group)
        return found, None, None, None


class Connect(torch.autograd.Function):
    """Returns its first argument, and gives the others gradients of zero.

    A rank whose experts have no tokens takes part in the collectives of the backward like the others.
    """

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ctx.like = [(other.shape, other.dtype, other.device) for other in others]
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)
