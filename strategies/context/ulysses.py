"""Ulysses attention: an all-to-all gives each rank the full sequence for some heads, and a second one reverts it.

Source: Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence
Transformer Models" (2023).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
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
    and run backward. For the arguments see `ring_attention`.

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
    """Split heads and join the sequence over the ranks (`to_heads`), or the reverse. Collective, in backward too."""
    split, join = (1, 2) if to_heads else (2, 1)
    sent = torch.stack(tensor.chunk(dist.get_world_size(group), split))
    received = all_to_all_single_autograd(sent, None, None, group or dist.distributed_c10d._get_default_group())
    return torch.cat(received.unbind(), join)
