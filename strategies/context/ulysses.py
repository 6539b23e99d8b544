"""Ulysses attention: an all-to-all gives each rank the full sequence for some heads, and a second one reverts it.

Source: Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence
Transformer Models" (2023).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from trainwright.core.errors import ConfigurationError

_attention = functional.scaled_dot_product_attention  # torch's function, even while SplitAttention replaces it


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup | None,
    *,
    is_causal: bool,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return the attention of this rank's queries over the keys and values of all ranks.

    The sequence is split in order `"plain"`. Every rank of the group must call this with tensors of the same shapes,
    and run backward.

    Args:
        q: (batch, heads, local length, head size).
        k: (batch, heads, local length, head size).
        v: (batch, heads, local length, value size).
        group: Process group that splits the sequence. None means all ranks.
        is_causal: A position sees only itself and earlier positions.
        scale: Factor of the scores. Default: 1 / √(head size).
        enable_gqa: Accept a number of heads of `q` that is a multiple of the number of heads of `k` and `v`.

    Raises:
        ConfigurationError: The number of heads of `q`, `k` or `v` is not divisible by the number of ranks.
    """
    size = dist.get_world_size(group)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.shape[1] % size:
            raise ConfigurationError(
                f"{name} has {tensor.shape[1]} heads, which Ulysses attention cannot divide among {size} ranks. Use a "
                "number of ranks that divides it, or ring attention."
            )
    q, k, v = (_exchange(tensor, group, to_heads=True) for tensor in (q, k, v))
    out = _attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    return _exchange(out, group, to_heads=False)


def _exchange(tensor: Tensor, group: dist.ProcessGroup | None, *, to_heads: bool) -> Tensor:
    exchanged: Tensor = _Exchange.apply(tensor, group, to_heads)  # type: ignore[no-untyped-call]  # untyped in torch
    return exchanged


class _Exchange(torch.autograd.Function):
    """Splits heads and joins the sequence over the ranks (`to_heads`), or the reverse."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup | None, to_heads: bool) -> Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        return _all_to_all(tensor, group, to_heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _all_to_all(gradient, ctx.group, not ctx.to_heads), None, None


def _all_to_all(tensor: Tensor, group: dist.ProcessGroup | None, to_heads: bool) -> Tensor:
    split, join = (1, 2) if to_heads else (2, 1)
    sent = torch.stack(tensor.chunk(dist.get_world_size(group), split))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), join)
