"""Exchange of tokens between ranks with different experts, and all-gather of the experts of one rank.

Sources: Lepikhin et al., "GShard" (2020); Rajbhandari et al., "DeepSpeed-MoE" (2022).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Function of tokens `(tokens, width)`, experts `(tokens, 1)` and weights `(tokens, 1)` that returns the outputs of the
experts, `(tokens, width)`."""

_all_gather: Callable[..., object]
_reduce_scatter: Callable[..., object]
if hasattr(dist, "all_gather_single"):
    _all_gather = dist.all_gather_single
    _reduce_scatter = dist.reduce_scatter_single
else:  # before torch 2.13
    _all_gather = dist.all_gather_into_tensor
    _reduce_scatter = dist.reduce_scatter_tensor


def exchange(
    tokens: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    *,
    num_experts: int,
    group: dist.ProcessGroup,
    compute: Compute,
) -> torch.Tensor:
    """Return, for each token, the weighted sum of the outputs of its experts, which may be on other ranks.

    Collective in the group, in backward too. Blocks on the device once, to read the number of tokens for each rank.

    Args:
        tokens: `(tokens, width)`, the tokens of this rank. Their number may differ between ranks.
        experts: `(tokens, k)`, integers: the indices of each token's experts.
        weights: `(tokens, k)`: the weights of each token's experts.
        num_experts: Total number of experts, divisible by the size of the group.
        group: Process group. Rank r holds `num_experts / size` experts, beginning with `r * num_experts / size`.
        compute: Applies this rank's experts to tokens. Expert indices are local, from 0.
    """
    size = group.size()
    top_k = experts.shape[-1]
    # Each token is sent top_k times, in the order of the experts. For example experts=[[2, 0], [0, 1]] (2 tokens, top_k
    # 2): expert_of_row=[2, 0, 0, 1], order=[1, 2, 3, 0], and the tokens are sent in the order 0, 1, 1, 0.
    expert_of_row = experts.reshape(-1)
    order = expert_of_row.argsort(stable=True)
    to_send = expert_of_row.bincount(minlength=num_experts)  # number of rows for each expert of all ranks
    to_receive = torch.empty_like(to_send)  # number of rows from each rank for each expert of this one
    dist.all_to_all_single(to_receive, to_send, group=group)
    per_rank = torch.stack([to_send, to_receive]).view(2, size, -1).sum(-1)
    sent, received = per_rank.tolist()  # waits for the device

    inputs = all_to_all_single_autograd(tokens[order // top_k], received, sent, group)
    # Rows arrive by rank, and those of a rank by expert: local experts 0, 1, …, 0, 1, … with to_receive rows each.
    local_experts = torch.arange(num_experts // size, device=tokens.device).repeat(size)
    local_experts = local_experts.repeat_interleave(to_receive, output_size=len(inputs)).unsqueeze(1)
    outputs = compute(inputs, local_experts, weights.new_ones(local_experts.shape))
    sorted_outputs = all_to_all_single_autograd(outputs.contiguous(), sent, received, group)

    of_experts = sorted_outputs[order.argsort()].view(*experts.shape, -1)  # (tokens, top_k, width)
    summed = (of_experts * weights.unsqueeze(-1)).sum(1)
    return summed.to(tokens.dtype)


class GatherExperts(torch.autograd.Function):
    """All-gather of experts that are sharded along the first dimension.

    Backward divides the gradient by `divisor` and sums it over the ranks, both in the dtype of the shard.
    """

    @staticmethod
    def forward(
        ctx: Any, shard: torch.Tensor, group: dist.ProcessGroup | None, dtype: torch.dtype, divisor: int
    ) -> torch.Tensor:
        ctx.group = group
        ctx.dtype = shard.dtype
        ctx.divisor = divisor
        shard = shard.to(dtype)
        if group is None:
            return shard.view_as(shard)
        gathered = shard.new_empty(group.size() * shard.shape[0], *shard.shape[1:])
        _all_gather(gathered, shard.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        grad = grads[0].to(ctx.dtype) / ctx.divisor
        if ctx.group is None:
            return grad, None, None, None
        of_shard = grad.new_empty(grad.shape[0] // ctx.group.size(), *grad.shape[1:])
        _reduce_scatter(of_shard, grad.contiguous(), group=ctx.group)
        return of_shard, None, None, None


class Connect(torch.autograd.Function):
    """Identity function of the first argument. Backward returns zero gradients for the other arguments.

    A rank whose experts receive no tokens therefore still runs the collectives of the backward.
    """

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ctx.like = [(other.shape, other.dtype, other.device) for other in others]
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        zeros = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like]
        return grads[0], *zeros
