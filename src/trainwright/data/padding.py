"""Padding to gather unequal numbers of rows from several ranks.

Evaluation repeats no sample, so that ranks may have unequal numbers of results. Collectives need equal shapes. Rows are
therefore padded to the length of the longest rank, gathered by the strategy, and trimmed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def pad_to(tensor: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `tensor` with zero rows appended up to `length` rows, and a mask that is True for its own rows.

    Args:
        tensor: shape (n, ...), n ≤ length, any dtype and device.
        length: number of rows of the result.

    Returns:
        The padded tensor of shape (length, ...), and the bool mask of shape (length,). If n = length, the tensor is not
        copied. Does not wait for the device.

    Raises:
        ValueError: the tensor has no first dimension, or more than `length` rows.
    """
    if tensor.dim() == 0:
        raise ValueError("pad_to expects a tensor with rows, got a 0-dim tensor; reshape it to (1,).")
    rows = tensor.shape[0]
    if rows > length:
        raise ValueError(f"tensor has {rows} rows, more than length={length}.")
    mask = torch.arange(length, device=tensor.device) < rows
    if rows == length:
        return tensor, mask
    padded = tensor.new_zeros((length, *tensor.shape[1:]))
    padded[:rows] = tensor
    return padded, mask


def trim(gathered: Sequence[torch.Tensor] | torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Return the real rows of the ranks' padded tensors, rank after rank: shape (sum(counts), ...).

    Args:
        gathered: one tensor per rank, each of shape (length, ...); or these stacked, shape (world, length, ...).
        counts: number of real rows of each rank, in rank order.

    Raises:
        ValueError: the numbers of tensors and counts differ or are 0, a count is negative, or a tensor has fewer rows
            than its count.
    """
    if len(gathered) != len(counts) or not counts:
        raise ValueError(f"{len(gathered)} gathered tensors, but {len(counts)} counts.")
    for rank, count in enumerate(counts):
        if count < 0:
            raise ValueError(f"the count of rank {rank} is negative: {count}.")
        if count > gathered[rank].shape[0]:
            raise ValueError(f"rank {rank} gathered {gathered[rank].shape[0]} rows, fewer than its count {count}.")
    return torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)])
