"""Pieces of tensors that lie on several ranks: this rank's one, the whole, and from a whole to a piece."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainwright.checkpoint.piece_files import SavedTensor
from trainwright.checkpoint.pieces import Box, Pieces
from trainwright.core.errors import CheckpointError
from trainwright.core.tree import map_tensors


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

    The piece lies on the device of `like` and has the dtype of `full`; on the same device it shares memory with it. Of
    a tensor that lies in pieces in a checkpoint no more than that is read.
    """
    mesh, piece = like.device_mesh, full
    if isinstance(full, SavedTensor):
        piece = full.read(box_of(like))
        return DTensor.from_local(
            piece.to(like.to_local().device),
            mesh,
            like.placements,
            run_check=False,
            shape=full.shape,
            stride=tuple(like.stride()),
        )
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


def box_of(tensor: DTensor) -> Box:
    """Return which block of the whole this rank holds. Not collective."""
    lengths, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Box(tuple(offsets), tuple(lengths))


def pieces_of(tree: Any) -> Any:
    """Return a tree of state with `Pieces` for its DTensors. Not collective; every rank does it with the same tree.

    Where several ranks hold the same values, they take turns, so that each writes about as many bytes.

    Raises:
        CheckpointError: the ranks hold addends of a tensor, and not parts of it.
    """
    known: dict[int, Pieces] = {}
    turns = _Turns()

    def piece(tensor: torch.Tensor) -> Any:
        if not isinstance(tensor, DTensor):
            return tensor
        if id(tensor) not in known:
            held = ((box_of(tensor), tensor.to_local().detach()),) if turns.is_ours(tensor) else ()
            known[id(tensor)] = Pieces(tuple(tensor.shape), tensor.dtype, held)
        return known[id(tensor)]

    return map_tensors(piece, tree)


class _Turns:
    """Who of those that hold the same values saves them: whoever has had the fewest bytes to save until now."""

    def __init__(self) -> None:
        self._bytes: dict[tuple[int, ...], list[int]] = {}  # by axes of the mesh: of each of their ranks

    def is_ours(self, tensor: DTensor) -> bool:
        if any(isinstance(placement, Partial) for placement in tensor.placements):
            raise CheckpointError(f"a tensor of {tuple(tensor.shape)} lies on the ranks as addends: reduce it first.")
        mesh = tensor.device_mesh
        axes = tuple(i for i, placement in enumerate(tensor.placements) if isinstance(placement, Replicate))
        rank, num = 0, 1
        for axis in axes:
            rank, num = rank * mesh.size(axis) + mesh.get_local_rank(axis), num * mesh.size(axis)
        # The ranks that hold the same values see the same tensors in the same order, and come to the same choice.
        saved = self._bytes.setdefault((mesh.ndim, *axes), [0] * num)
        chosen = min(range(num), key=saved.__getitem__)
        saved[chosen] += tensor.numel() * tensor.element_size()
        return chosen == rank
