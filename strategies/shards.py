"""Pieces of tensors that lie on several ranks: this rank's one, the whole, and from a whole to a piece."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Shard


def local_piece(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor: memory that it shares with it. Not collective."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor, device: torch.device, *, keep: bool) -> torch.Tensor:
    """Return a tensor whole, on the host; one that is not in pieces as it is.

    Args:
        tensor: of any shape and dtype.
        device: where its pieces are exchanged, one tensor at a time.
        keep: False: this rank wants the shape and dtype only, and gets a tensor on the device `meta`.

    Collective if it is in pieces, whatever `keep` says; waits for the device.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    moved = tensor.detach().to(device)
    assert isinstance(moved, DTensor)  # as it was
    full = moved.full_tensor()
    return full.cpu() if keep else torch.empty_like(full, device="meta")


def piece_of(full: torch.Tensor, like: DTensor) -> DTensor:
    """Cut the piece that this rank holds of `like` out of a whole tensor of its shape. Not collective.

    The piece lies on the device of `like` and has the dtype of `full`; on the same device it shares memory with it.
    """
    mesh, piece = like.device_mesh, full
    for axis, placement in enumerate(like.placements):
        if isinstance(placement, Shard):
            size = piece.shape[placement.dim]
            length = -(-size // mesh.size(axis))  # as torch.chunk cuts, so that the last ranks may have nothing
            start = min(size, mesh.get_local_rank(axis) * length)
            piece = piece.narrow(placement.dim, start, min(length, size - start))
    piece = piece.to(like.to_local().device)
    return DTensor.from_local(
        piece, mesh, like.placements, run_check=False, shape=full.shape, stride=tuple(like.stride())
    )
