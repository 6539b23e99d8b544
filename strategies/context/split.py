"""Split a sequence over the ranks of a process group, and join its parts."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainwright.core.errors import ConfigurationError

Order = Literal["zigzag", "plain"]
"""The order of a split sequence.

`"plain"`: rank r of n holds the r-th of n contiguous parts. `"zigzag"`: rank r holds chunks r and 2n-1-r of 2n, which
gives all ranks equal work in causal attention.
"""


def check_order(order: str) -> None:
    """Raise a `ConfigurationError` unless `order` is `"zigzag"` or `"plain"`."""
    if order not in ("zigzag", "plain"):
        raise ConfigurationError(f"order={order!r} is unknown. Use 'zigzag' or 'plain'.")


def positions(length: int, group: dist.ProcessGroup | None, order: Order) -> Tensor:
    """Return the positions of the full sequence that this rank holds, ascending, as int64 on the CPU.

    Args:
        length: Length of the full sequence.
        group: Process group that splits the sequence. None means all ranks.
        order: Order of the split sequence.

    Raises:
        ConfigurationError: `length` is not divisible by the number of chunks.
    """
    size = dist.get_world_size(group)
    num_chunks = _check_length(length, size, order)
    chunks = torch.arange(length).chunk(num_chunks) if length else (torch.arange(0),) * num_chunks
    return torch.cat([chunks[chunk] for chunk in _chunks_of(dist.get_rank(group), size, order)])


def split_sequence(tensor: Tensor, dim: int, group: dist.ProcessGroup | None, order: Order) -> Tensor:
    """Return this rank's part of a tensor that every rank holds in full, as a contiguous copy.

    The gradient of the full tensor is zero outside this rank's part. Not collective.

    Args:
        tensor: The full tensor, equal on all ranks of the group.
        dim: Dimension of the sequence.
        group: Process group that splits the sequence. None means all ranks.
        order: Order of the split sequence.

    Raises:
        ConfigurationError: The length of `dim` is not divisible by the number of ranks (`"plain"`) or by twice that
            number (`"zigzag"`).
    """
    return tensor.index_select(dim, positions(tensor.shape[dim], group, order).to(tensor.device)).contiguous()


def join_sequence(tensor: Tensor, dim: int, group: dist.ProcessGroup | None, order: Order) -> Tensor:
    """Return the full tensor on every rank, from each rank's part. Collective in the group, in backward too.

    Backward sums the gradients of all ranks, so that a part receives the gradient of the sum of the ranks' losses. If
    every rank computes the same loss from the full tensor, average the gradients of the parameters over the group.

    Args:
        tensor: This rank's part. All parts have the same shape.
        dim: Dimension of the sequence.
        group: Process group that splits the sequence. None means all ranks.
        order: Order in which the sequence was split.

    Raises:
        ConfigurationError: The order is `"zigzag"` and the length of `dim` is odd.
    """
    check_order(order)
    if order == "zigzag" and tensor.shape[dim] % 2:
        raise ConfigurationError(
            f"A part of {tensor.shape[dim]} positions cannot be joined in order 'zigzag', where each rank holds two "
            "chunks of equal length. Split the sequence with split_sequence(), or use order='plain'."
        )
    arguments = (tensor, dim % tensor.dim(), group, order)
    joined: Tensor = _Join.apply(*arguments)  # type: ignore[no-untyped-call]  # untyped in torch
    return joined


def _chunks_of(rank: int, size: int, order: Order) -> tuple[int, ...]:
    return (rank, 2 * size - 1 - rank) if order == "zigzag" else (rank,)


def _check_length(length: int, size: int, order: Order) -> int:
    """Return the number of chunks of a sequence."""
    check_order(order)
    num_chunks = 2 * size if order == "zigzag" else size
    if length % num_chunks:
        following = (length // num_chunks + 1) * num_chunks
        factor = f"2 × {size}, as each rank holds two parts of it" if order == "zigzag" else f"{size}"
        raise ConfigurationError(
            f"A sequence of {length} positions cannot be split over {size} ranks: its length must be divisible by "
            f"{factor}. Pad it to {following}."
        )
    return num_chunks


class _Join(torch.autograd.Function):
    """Gathers the parts of all ranks. Backward reduces and scatters their gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: dist.ProcessGroup | None, order: Order) -> Tensor:
        ctx.dim, ctx.group, ctx.order = dim, group, order
        size = dist.get_world_size(group)
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(size)]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        chunks: dict[int, Tensor] = {}
        for rank, part in enumerate(parts):
            held = _chunks_of(rank, size, order)
            chunks.update(zip(held, part.chunk(len(held), dim), strict=True))
        return torch.cat([chunks[chunk] for chunk in sorted(chunks)], dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        size = dist.get_world_size(ctx.group)
        chunks = gradient.chunk(2 * size if ctx.order == "zigzag" else size, ctx.dim)
        parts = [
            torch.cat([chunks[chunk] for chunk in _chunks_of(rank, size, ctx.order)], ctx.dim) for rank in range(size)
        ]
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, parts, group=ctx.group)
        return own, None, None, None
