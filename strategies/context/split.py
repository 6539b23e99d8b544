"""Split a sequence over the ranks of a process group."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.core.errors import ConfigurationError

Order = Literal["zigzag", "plain"]
"""The order of a split sequence.

`"plain"`: rank r of n holds the r-th of n contiguous parts. `"zigzag"`: rank r holds chunks r and 2n-1-r of 2n, which
gives all ranks equal work in causal attention.
"""


def positions(length: int, group: dist.ProcessGroup | None, order: Order) -> Tensor:
    """Return the positions of the full sequence that this rank holds, ascending, as int64 on the CPU.

    Args:
        length: Length of the full sequence.
        group: Process group that splits the sequence. None means all ranks.
        order: See `Order`.

    Raises:
        ConfigurationError: `length` is not divisible by the number of ranks (`"plain"`) or by twice that number
            (`"zigzag"`).
    """
    size = dist.get_world_size(group)
    rank = dist.get_rank(group)
    num_chunks = 2 * size if order == "zigzag" else size
    if length % num_chunks:
        following = (length // num_chunks + 1) * num_chunks
        factor = f"2 × {size}, as each rank holds two parts of the sequence" if order == "zigzag" else f"{size}"
        raise ConfigurationError(
            f"A sequence of {length} positions cannot be split over {size} ranks: its length must be divisible by "
            f"{factor}. Pad it to {following}."
        )
    chunks = torch.arange(length).view(num_chunks, length // num_chunks)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]]) if order == "zigzag" else chunks[rank]


def split_sequence(tensor: Tensor, dim: int, group: dist.ProcessGroup | None, order: Order) -> Tensor:
    """Return this rank's part of a tensor that every rank holds in full, as a contiguous copy.

    The gradient of the full tensor is zero outside this rank's part. Not collective.

    Args:
        tensor: The full tensor, equal on all ranks of the group.
        dim: Dimension of the sequence.
        group, order: See `positions`, also for errors.
    """
    return tensor.index_select(dim, positions(tensor.shape[dim], group, order).to(tensor.device)).contiguous()
