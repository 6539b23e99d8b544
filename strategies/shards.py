"""Shards of DTensors: gather full tensors, and shard full tensors.

A dimension may be sharded twice: tensor parallelism splits a layer first, and FSDP then shards the result over the
data-parallel ranks, although its axis comes first in the mesh. The shard of a rank then consists of several blocks of
the full tensor. The same is true for layers whose blocks are split separately, such as a fused QKV.
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

from trainwright.checkpoint.format.regions import Box, TensorShards
from trainwright.checkpoint.format.shard_files import SavedTensor
from trainwright.core.errors import CheckpointError
from trainwright.core.tree import map_tensors

IndexRange = tuple[int, int]
"""Consecutive indices of a shard along one dimension of the full tensor: the first index and the number."""


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor, which shares its memory. Not collective."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gather_full(tensor: torch.Tensor, device: torch.device, *, keep: bool) -> torch.Tensor:
    """Return the full value of a DTensor on the host. Other tensors are returned as they are.

    Collective for a DTensor, also with `keep=False`. Waits for the device.

    Args:
        tensor: A tensor of any shape and dtype.
        device: Device on which the shards are gathered.
        keep: False if this rank needs only shape and dtype. The rank then gets a tensor on the device `meta`.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    moved = tensor.detach().to(device)
    assert isinstance(moved, DTensor)  # for the type checker
    full = _joined(moved) if _is_split_in_reverse(moved) else moved.full_tensor()
    return full.cpu() if keep else torch.empty_like(full, device="meta")


def full_output(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full value of a step's output on its device, with autograd. Collective for a DTensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(full: torch.Tensor, like: DTensor) -> DTensor:
    """Shard a full tensor in the same way as `like`, which has the same shape. Not collective.

    The shard is on the device of `like` and has the dtype of `full`. It may share memory with `full`. If `full` is in a
    sharded checkpoint, only this rank's shard is read.
    """
    if isinstance(full, SavedTensor):
        shard = _read(full, like)
    else:
        shard = full
        for dim, ranges in enumerate(_index_ranges(like)):
            parts = [shard.narrow(dim, start, length) for start, length in ranges]
            shard = parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)  # one part is a view, without a copy
    return DTensor.from_local(
        shard.to(like.to_local().device),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=full.shape,
        stride=tuple(like.stride()),
    )


def _read(saved: SavedTensor, like: DTensor) -> torch.Tensor:
    """Read the shard of this rank from a checkpoint."""
    boxes = boxes_of(like)
    if len(boxes) == 1:
        (box, _) = boxes[0]
        return saved.read(box)
    shard = torch.empty(like.to_local().shape, dtype=saved.dtype)
    for box, place in boxes:
        shard[place] = saved.read(box)
    return shard


def boxes_of(tensor: DTensor, rank: Sequence[int] | None = None) -> list[tuple[Box, tuple[slice, ...]]]:
    """Return the blocks of the full tensor in a rank's shard, each with its position in the shard. Not collective.

    Args:
        tensor: The DTensor.
        rank: Coordinates of the rank in the tensor's mesh. Default: None, this rank.
    """
    by_dim: list[list[tuple[IndexRange, slice]]] = []  # for each dimension, each range and its position in the shard
    for ranges in _index_ranges(tensor, rank):
        position = 0
        placed = []
        for start, length in ranges:
            placed.append(((start, length), slice(position, position + length)))
            position += length
        by_dim.append(placed)
    # A block is one run of each dimension: rows 0-1 and 4-5 of columns 2-3 are two blocks.
    blocks = []
    for block in itertools.product(*by_dim):
        offsets = tuple(start for (start, _), _ in block)
        lengths = tuple(length for (_, length), _ in block)
        blocks.append((Box(offsets, lengths), tuple(place for _, place in block)))
    return blocks


def shard_tree(tree: object, mesh: DeviceMesh) -> Any:
    """Return a tree of state with `TensorShards` in place of its DTensors. Not collective.

    Every rank must pass the same tree. If several ranks hold the same shard, only one of them writes it. The choice
    gives all ranks similar numbers of bytes to write.

    Args:
        tree: The state.
        mesh: The mesh with all axes of the run.

    Raises:
        CheckpointError: A tensor has partial sums instead of shards.
    """
    known: dict[int, TensorShards] = {}
    turns = _Turns(mesh)

    def to_save(tensor: torch.Tensor) -> Any:
        if not isinstance(tensor, DTensor):
            return tensor
        if id(tensor) not in known:
            blocks: list[tuple[Box, torch.Tensor]] = []
            if turns.take_turn(tensor):
                local = tensor.to_local().detach()
                blocks = [(box, local[place]) for box, place in boxes_of(tensor)]
            known[id(tensor)] = TensorShards(tuple(tensor.shape), tensor.dtype, tuple(blocks))
        return known[id(tensor)]

    return map_tensors(to_save, tree)


class _Turns:
    """Chooses which of the ranks with the same shard saves it: the rank that has saved the fewest bytes so far."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._bytes: dict[tuple[str, ...], list[int]] = {}  # mesh axes → bytes of each rank along them

    def take_turn(self, tensor: DTensor) -> bool:
        """Choose the rank that saves a tensor, and count its bytes. Return whether this rank was chosen."""
        if any(isinstance(placement, Partial) for placement in tensor.placements):
            raise CheckpointError(
                f"a tensor of shape {tuple(tensor.shape)} has partial sums. Call redistribute() first."
            )
        axes = _copied_over(tensor, self._mesh)
        names = self._mesh.mesh_dim_names or ()
        rank = 0  # of this process among those with the same shard
        num = 1
        for axis in axes:
            size = self._mesh.size(names.index(axis))
            rank = rank * size + self._mesh.get_local_rank(axis)
            num *= size
        # All ranks with the same shards process the same tensors in the same order, and make the same choice.
        saved = self._bytes.setdefault(axes, [0] * num)
        chosen = min(range(num), key=saved.__getitem__)
        saved[chosen] += tensor.numel() * tensor.element_size()
        return chosen == rank


def sharded_axes(tensor: torch.Tensor) -> set[str]:
    """Return the names of the mesh axes along which a tensor is sharded. Not collective."""
    if not isinstance(tensor, DTensor):
        return set()
    names = tensor.device_mesh.mesh_dim_names or ()
    return {name for name, placement in zip(names, tensor.placements, strict=True) if _is_sharded(placement)}


def counts_here(tensor: torch.Tensor, mesh: DeviceMesh) -> bool:
    """Return whether this rank's shard counts in a sum over all ranks. Not collective.

    If several ranks hold the same shard, it counts only on the first of these ranks.

    Args:
        tensor: A parameter.
        mesh: The mesh with all axes of the run.
    """
    return all(mesh.get_local_rank(name) == 0 for name in _copied_over(tensor, mesh))


def _copied_over(tensor: torch.Tensor, mesh: DeviceMesh) -> tuple[str, ...]:
    """Return the names of the mesh axes along which a tensor is replicated, except the pipeline axis."""
    # The stages of a pipeline hold different tensors, so that no tensor is replicated along their axis.
    axes = {"pp", *sharded_axes(tensor)}
    return tuple(name for name in mesh.mesh_dim_names or () if name not in axes)


def _is_sharded(placement: Placement) -> TypeGuard[Shard | _StridedShard]:
    return isinstance(placement, (Shard, _StridedShard))


def _is_split_in_reverse(tensor: DTensor) -> bool:
    """Return whether a dimension was sharded along a later mesh axis before an earlier one."""
    return any(isinstance(placement, _StridedShard) for placement in tensor.placements[:-1])


def _index_ranges(tensor: DTensor, rank: Sequence[int] | None = None) -> list[list[IndexRange]]:
    """Return, for each dimension, which indices of the full tensor a rank's shard holds, in the order of the shard."""
    mesh = tensor.device_mesh
    coordinates = rank or [mesh.get_local_rank(axis) for axis in range(mesh.ndim)]
    ranges = [[(0, size)] for size in tensor.shape]
    axes = list(enumerate(tensor.placements))
    if _is_split_in_reverse(tensor):
        axes.reverse()  # in the order in which the dimension was split
    for axis, placement in axes:
        if _is_sharded(placement):
            dim = placement.dim
            ranges[dim] = _split(ranges[dim], _blocks(tensor, axis), mesh.size(axis), coordinates[axis])
    return ranges


def _blocks(tensor: DTensor, axis: int) -> int:
    """Return into how many blocks a dimension is divided before each block is sharded along a mesh axis."""
    placement = tensor.placements[axis]
    # On an earlier axis, torch's split factor is the number of shards along later axes.
    is_last = axis == len(tensor.placements) - 1
    if is_last and isinstance(placement, _StridedShard):
        return int(placement.split_factor)
    return 1


def _split(ranges: list[IndexRange], blocks: int, ranks: int, rank: int) -> list[IndexRange]:
    """Divide indices into blocks, shard each block over `ranks` ranks, and return the indices of one rank."""
    if blocks == 1:
        return _chunk(ranges, ranks, rank)
    split: list[IndexRange] = []
    for block in range(blocks):
        split += _chunk(_chunk(ranges, blocks, block), ranks, rank)
    return split


def _chunk(ranges: list[IndexRange], num: int, which: int) -> list[IndexRange]:
    """Return one of `num` chunks of `torch.chunk`. The last chunks may be empty.

    The second of 2 chunks of the ranges (0, 2) and (6, 4), which are the indices 0, 1, 6, 7, 8, 9, is (7, 3).
    """
    size = sum(length for _, length in ranges)
    chunk_size = -(-size // num)  # rounded up
    begin = min(size, which * chunk_size)
    end = min(size, begin + chunk_size)
    chunk = []
    position = 0  # of the run in the sequence of all indices
    for start, length in ranges:
        low = max(begin, position)
        high = min(end, position + length)
        if low < high:
            chunk.append((start + low - position, high - low))
        position += length
    return chunk or [(0, 0)]


def _joined(tensor: DTensor) -> torch.Tensor:
    """Gather a tensor that `_is_split_in_reverse`. torch 2.13 gathers uneven shards and blocks wrongly. Collective."""
    mesh = tensor.device_mesh
    local = tensor.to_local()
    # Of the ranks that hold the same shard, the first one along each axis stands for all.
    ranks = [range(mesh.size(axis)) if _is_sharded(p) else [0] for axis, p in enumerate(tensor.placements)]
    boxes = {}
    shapes = {}
    for rank in itertools.product(*ranks):
        boxes[rank] = boxes_of(tensor, rank)
        shapes[rank] = [max(place[dim].stop for _, place in boxes[rank]) for dim in range(tensor.dim())]
    # All ranks send as many elements as the largest shard has, because a gather needs tensors of one size.
    gathered = local.new_zeros(max(map(math.prod, shapes.values())))
    gathered[: local.numel()] = local.flatten()
    # The last axis first: each turn adds a dimension in front, and the first axis becomes the first dimension.
    for axis, placement in reversed(list(enumerate(tensor.placements))):
        if _is_sharded(placement):
            parts = [torch.empty_like(gathered) for _ in range(mesh.size(axis))]
            dist.all_gather(parts, gathered, group=mesh.get_group(axis))
            gathered = torch.stack(parts)
        else:
            gathered = gathered.unsqueeze(0)
    # `gathered` now has one dimension for each mesh axis, and then the elements of the shard.
    full = local.new_empty(tensor.shape)
    for rank, shape in shapes.items():
        shard = gathered[rank][: math.prod(shape)].view(shape)
        for box, place in boxes[rank]:
            region = tuple(slice(i, i + n) for i, n in zip(box.offsets, box.lengths, strict=True))
            full[region] = shard[place]
    return full
