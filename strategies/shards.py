"""Pieces of tensors that lie on several ranks: this rank's one, the whole, and from a whole to a piece.

A tensor may be cut twice: a layer is split over the ranks of a tensor-parallel group first, and what is left of it over
the data-parallel ranks then. The axes of its mesh stand the other way round. What a rank holds of it then, or of a
layer whose blocks are split one by one, is not one block of the whole but several, side by side.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from trainwright.checkpoint.format.regions import Box, Pieces
from trainwright.checkpoint.format.shard_files import SavedTensor
from trainwright.core.errors import CheckpointError
from trainwright.core.tree import map_tensors

Run = tuple[int, int]
"""Indices along one dimension of a whole that lie side by side in a piece: the first one, and how many."""


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
    full = _joined(moved) if _is_cut_twice(moved) else moved.full_tensor()
    return full.cpu() if keep else torch.empty_like(full, device="meta")


def whole_output(tensor: torch.Tensor) -> torch.Tensor:
    """Return whole what a step has given in pieces, on its device; gradients flow through it. Collective if it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def piece_of(full: torch.Tensor, like: DTensor) -> DTensor:
    """Cut the piece that this rank holds of `like` out of a whole tensor of its shape. Not collective.

    The piece lies on the device of `like` and has the dtype of `full`; on the same device it may share memory with it.
    Of a tensor that lies in pieces in a checkpoint no more than that is read.
    """
    if isinstance(full, SavedTensor):
        piece = _read(full, like)
    else:
        piece = full
        for dim, runs in enumerate(_runs(like)):
            parts = [piece.narrow(dim, *run) for run in runs]
            piece = parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)
    return DTensor.from_local(
        piece.to(like.to_local().device),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=full.shape,
        stride=tuple(like.stride()),
    )


def _read(saved: SavedTensor, like: DTensor) -> torch.Tensor:
    """Read what this rank holds of `like`, and no more."""
    boxes = boxes_of(like)
    if len(boxes) == 1:
        return saved.read(boxes[0][0])
    found = torch.empty(like.to_local().shape, dtype=saved.dtype)
    for box, place in boxes:
        found[place] = saved.read(box)
    return found


def boxes_of(tensor: DTensor, rank: Sequence[int] | None = None) -> list[tuple[Box, tuple[slice, ...]]]:
    """Return which blocks of the full tensor a rank holds, each with its place in the rank's part. Not collective.

    Args:
        rank: Its coordinates in the tensor's mesh. Default: None, which is this rank.
    """
    by_dim = []
    for runs in _runs(tensor, rank):
        stops = itertools.accumulate(length for _, length in runs)
        by_dim.append([(run, slice(stop - run[1], stop)) for run, stop in zip(runs, stops, strict=True)])
    return [
        (Box(tuple(start for (start, _), _ in chosen), tuple(length for (_, length), _ in chosen)), tuple(
            place for _, place in chosen
        ))
        for chosen in itertools.product(*by_dim)
    ]  # fmt: skip


def pieces_of(tree: Any, mesh: DeviceMesh) -> Any:
    """Return a tree of state with `Pieces` for its DTensors. Not collective; every rank does it with the same tree.

    Where several ranks hold the same values, they take turns, so that each writes about as many bytes.

    Args:
        tree: the state.
        mesh: all the axes of the run, by name.

    Raises:
        CheckpointError: the ranks hold addends of a tensor, and not parts of it.
    """
    known: dict[int, Pieces] = {}
    turns = _Turns(mesh)

    def piece(tensor: torch.Tensor) -> Any:
        if not isinstance(tensor, DTensor):
            return tensor
        if id(tensor) not in known:
            ours, local = turns.is_ours(tensor), tensor.to_local().detach()
            held = tuple((box, local[place]) for box, place in boxes_of(tensor)) if ours else ()
            known[id(tensor)] = Pieces(tuple(tensor.shape), tensor.dtype, held)
        return known[id(tensor)]

    return map_tensors(piece, tree)


class _Turns:
    """Who of those that hold the same values saves them: whoever has had the fewest bytes to save until now."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._bytes: dict[tuple[str, ...], list[int]] = {}  # by axes of the mesh: of each of their ranks

    def is_ours(self, tensor: DTensor) -> bool:
        if any(isinstance(placement, Partial) for placement in tensor.placements):
            raise CheckpointError(f"a tensor of {tuple(tensor.shape)} lies on the ranks as addends: reduce it first.")
        axes = _copied_over(tensor, self._mesh)
        rank, num = 0, 1
        for axis in axes:
            size = self._mesh.size((self._mesh.mesh_dim_names or ()).index(axis))
            rank, num = rank * size + self._mesh.get_local_rank(axis), num * size
        # The ranks that hold the same values see the same tensors in the same order, and come to the same choice.
        saved = self._bytes.setdefault(axes, [0] * num)
        chosen = min(range(num), key=saved.__getitem__)
        saved[chosen] += tensor.numel() * tensor.element_size()
        return chosen == rank


def cut_axes(tensor: torch.Tensor) -> set[str]:
    """Return the names of the mesh's axes over which a tensor is cut; none for one that is whole. Not collective."""
    if not isinstance(tensor, DTensor):
        return set()
    names = tensor.device_mesh.mesh_dim_names or ()
    return {name for name, placement in zip(names, tensor.placements, strict=True) if _is_cut(placement)}


def counts_here(tensor: torch.Tensor, mesh: DeviceMesh) -> bool:
    """Tell whether a sum over all ranks takes this rank's piece: of those that hold the same one, one. Not collective.

    Args:
        tensor: a parameter.
        mesh: all the axes of the run, by name.
    """
    return all(mesh.get_local_rank(name) == 0 for name in _copied_over(tensor, mesh))


def _copied_over(tensor: torch.Tensor, mesh: DeviceMesh) -> tuple[str, ...]:
    """Return the names of the axes along which all ranks hold the same values; stages of a pipeline never do."""
    axes = {"pp", *cut_axes(tensor)}
    return tuple(name for name in mesh.mesh_dim_names or () if name not in axes)


def _is_cut(placement: Placement) -> TypeGuard[Shard | _StridedShard]:
    return isinstance(placement, (Shard, _StridedShard))


def _is_cut_twice(tensor: DTensor) -> bool:
    """Whether a dimension was cut along a later axis of the mesh before it was along an earlier one."""
    return any(isinstance(placement, _StridedShard) for placement in tensor.placements[:-1])


def _runs(tensor: DTensor, rank: Sequence[int] | None = None) -> list[list[Run]]:
    """Return for each dimension which indices of the full tensor a rank holds, in the order of its part."""
    mesh = tensor.device_mesh
    here = rank or [mesh.get_local_rank(axis) for axis in range(mesh.ndim)]
    found = [[(0, size)] for size in tensor.shape]
    axes = list(enumerate(tensor.placements))
    for axis, placement in reversed(axes) if _is_cut_twice(tensor) else axes:
        if _is_cut(placement):
            dim, blocks = placement.dim, _blocks(tensor, axis)
            found[dim] = _cut(found[dim], blocks, mesh.size(axis), here[axis])
    return found


def _blocks(tensor: DTensor, axis: int) -> int:
    """Return into how many blocks a dimension falls that are each cut along an axis."""
    placement = tensor.placements[axis]
    # On an earlier axis torch's split factor says what was cut before.
    is_last = axis == len(tensor.placements) - 1
    return int(placement.split_factor) if is_last and isinstance(placement, _StridedShard) else 1


def _cut(runs: list[Run], blocks: int, ranks: int, rank: int) -> list[Run]:
    """Return what one rank gets of some indices whose blocks are each cut over ranks."""
    if blocks > 1:
        parts = [_chunk(runs, blocks, block) for block in range(blocks)]
        return [run for part in parts for run in _chunk(part, ranks, rank)]
    return _chunk(runs, ranks, rank)


def _chunk(runs: list[Run], num: int, which: int) -> list[Run]:
    """Return one of `num` chunks, as torch.chunk cuts: the last ones may have nothing."""
    size = sum(length for _, length in runs)
    length = -(-size // num)
    begin, end = min(size, which * length), min(size, (which + 1) * length)
    found, position = [], 0
    for start, count in runs:
        low, high = max(begin, position), min(end, position + count)
        if low < high:
            found.append((start + low - position, high - low))
        position += count
    return found or [(0, 0)]


def _joined(tensor: DTensor) -> torch.Tensor:
    """Return a tensor that was cut twice in full; torch 2.13 joins uneven parts and blocks wrongly. Collective."""
    mesh, local = tensor.device_mesh, tensor.to_local()
    ranks = [range(mesh.size(axis)) if _is_cut(p) else [0] for axis, p in enumerate(tensor.placements)]
    boxes = {rank: boxes_of(tensor, rank) for rank in itertools.product(*ranks)}
    shapes = {
        rank: [max(place[dim].stop for _, place in of) for dim in range(tensor.dim())] for rank, of in boxes.items()
    }
    found = local.new_zeros(max(map(math.prod, shapes.values())))
    found[: local.numel()] = local.flatten()
    for axis, placement in reversed(list(enumerate(tensor.placements))):
        if _is_cut(placement):
            parts = [torch.empty_like(found) for _ in range(mesh.size(axis))]
            dist.all_gather(parts, found, group=mesh.get_group(axis))
            found = torch.stack(parts)
        else:
            found = found.unsqueeze(0)
    full = local.new_empty(tensor.shape)
    for rank, shape in shapes.items():
        part = found[rank][: math.prod(shape)].view(shape)
        for box, place in boxes[rank]:
            full[tuple(slice(i, i + n) for i, n in zip(box.offsets, box.lengths, strict=True))] = part[place]
    return full
