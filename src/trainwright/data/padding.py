"""Gather unequal numbers of rows from several ranks exactly: pad to the longest, gather, remove the padding. Evaluation
assigns micro-batch m to rank m mod world and repeats no sample, so that ranks have unequal numbers of results.
Collectives need equal shapes: each rank pads its rows, with a mask of the real ones, and every rank removes the padding
after the gather. Pure functions on tensors; the collective itself is the strategy's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def pad_to(tensor: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `tensor` with zero rows appended up to `length` rows, and a mask of the real ones.

    Args:
        tensor: shape (n, ...), n ≤ length, any dtype and device.
        length: number of rows of the result.

    Returns:
        The padded tensor, shape (length, ...), the tensor itself if n = length; and the mask, shape (length,), bool,
        on the same device. Does not wait for the device.

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
    """Return the real rows of the ranks' padded tensors, rank after rank.

    Args:
        gathered: one tensor per rank, each of shape (length, ...); or these stacked, shape (world, length, ...).
        counts: real rows of each rank, in rank order.

    Returns:
        Shape (sum(counts), ...).

    Raises:
        ValueError: the numbers of tensors and counts differ, or a tensor has fewer rows than its count.
    """
    _check(gathered, counts)
    return torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)])


def interleave(gathered: Sequence[torch.Tensor] | torch.Tensor, counts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the real rows of the ranks' padded tensors, in the order of one process: round by round, rank by rank.

    Args:
        gathered: one tensor per rank, each of shape (length, ...), its rounds one after the other and padding last; or
            these stacked, shape (world, length, ...).
        counts: for each rank, its real rows in each round; a rank may have had fewer rounds than another.

    Returns:
        Shape (sum of all counts, ...).

    Raises:
        ValueError: the numbers of tensors and counts differ, or a tensor has fewer rows than its counts.
    """
    _check(gathered, [sum(of_rank) for of_rank in counts])
    places = [0] * len(counts)
    pieces = []
    for round_index in range(max(map(len, counts), default=0)):
        for rank, of_rank in enumerate(counts):
            if round_index < len(of_rank):
                start = places[rank]
                places[rank] = start + of_rank[round_index]
                pieces.append(gathered[rank][start : places[rank]])
    return torch.cat(pieces) if pieces else gathered[0][:0]


def _check(gathered: Sequence[torch.Tensor] | torch.Tensor, counts: Sequence[int]) -> None:
    if len(gathered) != len(counts) or not counts:
        raise ValueError(f"{len(gathered)} gathered tensors, but {len(counts)} counts.")
    for rank, count in enumerate(counts):
        if not 0 <= count <= gathered[rank].shape[0]:
            raise ValueError(f"rank {rank} gathered {gathered[rank].shape[0]} rows, fewer than its count {count}.")
