"""Regions of sharded tensors: the elements of a full tensor that a shard contains.

DTensors are sharded into boxes. The flat shards of DeepSpeed's ZeRO are spans. A span is a sequence of boxes, so that
two regions of any kind are compared and copied box by box.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from trainwright.core.errors import CheckpointError

# Boxes that no dimension separates are compared in pairs. The layouts of ranks leave a few of them. A damaged file
# could name thousands.
_MAX_INSEPARABLE = 1_000


@dataclass(frozen=True, slots=True)
class Box:
    """A block of a tensor: its first index and its length in each dimension."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """The elements `[start, stop)` of a flattened tensor (row-major)."""

    start: int
    stop: int


Region = Box | Span


@dataclass(frozen=True, slots=True)
class TensorShards:
    """The shards of a tensor that this rank saves. They replace the tensor in the state trees of a `Snapshot`.

    Every rank has a `TensorShards` at the same path of its trees. The regions of all ranks cover the tensor without
    overlaps, since only one rank saves a replicated shard.

    Attributes:
        shape: shape of the full tensor.
        dtype: dtype of the tensor.
        held: this rank's regions, each with its values on any device. Values have the shape of the box, or are 1-D for
            a span.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    held: tuple[tuple[Region, torch.Tensor], ...] = ()


def full_region(shape: tuple[int, ...]) -> Box:
    """Return the region that covers a full tensor."""
    return Box((0,) * len(shape), tuple(shape))


def lengths_of(region: Region) -> tuple[int, ...]:
    """Return the shape of a tensor with the values of a region: that of the box, or 1-D for a span."""
    return region.lengths if isinstance(region, Box) else (region.stop - region.start,)


def num_elements(region: Region) -> int:
    """Return how many elements the region has."""
    return math.prod(lengths_of(region))


def fits(region: Region, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor of this shape contains the region."""
    if isinstance(region, Span):
        return 0 <= region.start <= region.stop <= math.prod(shape)
    if not len(region.offsets) == len(region.lengths) == len(shape):
        return False
    for begin, length, size in zip(region.offsets, region.lengths, shape, strict=True):
        if begin < 0 or length < 0 or begin + length > size:
            return False
    return True


def copy_common(
    target: torch.Tensor, target_region: Region, source: torch.Tensor, source_region: Region, shape: tuple[int, ...]
) -> None:
    """Copy the elements that two regions of a tensor of shape `shape` have in common from `source` to `target`.

    `source` has the values of `source_region`, and `target` receives those of `target_region`. Both may have additional
    trailing dimensions, such as the 2 of complex numbers that are stored as pairs.
    """
    for target_box, target_values in _blocks(target, target_region, shape):
        for source_box, source_values in _blocks(source, source_region, shape):
            common = _common(target_box, source_box)
            if common is not None:
                _part(target_values, target_box, common).copy_(_part(source_values, source_box, common))


def overlap(regions: list[Region], shape: tuple[int, ...]) -> bool:
    """Return whether any two regions of one tensor share an element.

    Boxes are sorted along one dimension and divided into groups that share no index. Each group is then divided along
    other dimensions. This separates the shards of ranks in near-linear time. More than 1,000 boxes that cannot be
    separated raise a `CheckpointError`.
    """
    boxes = []
    for region in regions:
        boxes += [box for box in _boxes(region, shape) if math.prod(box.lengths)]
    groups = [boxes]  # boxes of different groups share no element
    while groups:
        group = groups.pop()
        if len(group) < 2:
            continue
        parts = _separate(group, len(shape))
        if len(parts) > 1:
            groups.extend(parts)
            continue
        # No dimension separates these boxes. Some overlap, or they interlock like bricks around a gap.
        if len(group) > _MAX_INSEPARABLE:
            raise CheckpointError(
                f"{len(group)} blocks of a tensor of shape {shape} cannot be checked for overlaps, because sharding "
                "over ranks never produces their layout. The checkpoint is probably damaged. Use another one."
            )
        if any(_common(one, other) is not None for one, other in itertools.combinations(group, 2)):
            return True
    return False


def _separate(boxes: list[Box], num_dims: int) -> list[list[Box]]:
    """Divide boxes along the first dimension that separates them. Return one group if none does."""
    for dim in range(num_dims):
        parts = _divide(boxes, dim)
        if len(parts) > 1:
            return parts
    return [boxes]


def _divide(boxes: list[Box], dim: int) -> list[list[Box]]:
    """Divide boxes into groups. Boxes of different groups share no index of the dimension `dim`."""
    parts: list[list[Box]] = []
    stop = 0  # end of the last group: no box in it has an index of `stop` or above
    for box in sorted(boxes, key=lambda box: box.offsets[dim]):
        if not parts or box.offsets[dim] >= stop:
            parts.append([])
        parts[-1].append(box)
        stop = max(stop, box.offsets[dim] + box.lengths[dim])
    return parts


def _boxes(region: Region, shape: tuple[int, ...]) -> list[Box]:
    """Return boxes that cover a region, in the order of the elements."""
    if isinstance(region, Box):
        return [region]
    return list(_split(region.start, region.stop, shape))


def _split(start: int, stop: int, shape: tuple[int, ...]) -> Iterator[Box]:
    """Yield boxes that cover the elements `[start, stop)` of a flattened tensor, in the order of the elements."""
    # In a tensor of shape (3, 4), Span(2, 11) is the end of row 0, all of row 1 and the beginning of row 2:
    # Box((0, 2), (1, 2)), Box((1, 0), (1, 4)), Box((2, 0), (1, 3)).
    if start >= stop:
        return
    if not shape:  # a scalar
        yield Box((), ())
        return
    inner = shape[1:]  # shape of a row
    row_size = math.prod(inner)
    first, begin = divmod(start, row_size)  # the span starts at element `begin` of row `first`,
    last, end = divmod(stop, row_size)  # and stops before element `end` of row `last`
    if first == last:
        yield from _split_row(first, begin, end, inner)
        return
    if begin:
        yield from _split_row(first, begin, row_size, inner)
        first += 1
    if first < last:  # complete rows
        yield Box((first, *(0,) * len(inner)), (last - first, *inner))
    yield from _split_row(last, 0, end, inner)  # nothing if `end` is 0


def _split_row(row: int, begin: int, end: int, inner: tuple[int, ...]) -> Iterator[Box]:
    """Yield boxes that cover the elements `[begin, end)` of a row, whose shape is `inner`."""
    for box in _split(begin, end, inner):
        yield Box((row, *box.offsets), (1, *box.lengths))


def _blocks(values: torch.Tensor, region: Region, shape: tuple[int, ...]) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield each box of a region with a view of its values."""
    if isinstance(region, Box):
        yield region, values
        return
    # The values of a span are 1-D, apart from trailing dimensions. Those of a box follow each other.
    position = 0
    for box in _boxes(region, shape):
        count = math.prod(box.lengths)
        yield box, values[position : position + count].view((*box.lengths, *values.shape[1:]))
        position += count


def _common(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes, or None if it is empty."""
    begins = []
    lengths = []
    for dim in range(len(one.offsets)):
        begin = max(one.offsets[dim], other.offsets[dim])
        end = min(one.offsets[dim] + one.lengths[dim], other.offsets[dim] + other.lengths[dim])
        if begin >= end:
            return None
        begins.append(begin)
        lengths.append(end - begin)
    return Box(tuple(begins), tuple(lengths))


def _part(values: torch.Tensor, box: Box, common: Box) -> torch.Tensor:
    """Return a view of the values of `box` that are in `common`, which is inside `box`."""
    for dim, (begin, length) in enumerate(zip(common.offsets, common.lengths, strict=True)):
        values = values.narrow(dim, begin - box.offsets[dim], length)
    return values
