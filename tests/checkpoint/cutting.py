"""Cut a snapshot into the pieces that several ranks hold, and write it as they do, in one process."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trainwright.checkpoint import Box, Draft, Region, Snapshot, Span, TensorShards, plan_share
from trainwright.checkpoint.disk.planned_file import write_files
from trainwright.core.tree import map_tensors

Cut = Callable[[tuple[int, ...], int], list[list[Region]]]


def rows(shape: tuple[int, ...], world: int) -> list[list[Region]]:
    """Cut along the first dimension, as `torch.chunk` does: the last ranks may have nothing."""
    length = -(-shape[0] // world)
    starts = [min(shape[0], rank * length) for rank in range(world + 1)]
    return [[Box((a, *(0 for _ in shape[1:])), (b - a, *shape[1:]))] for a, b in itertools.pairwise(starts)]


def tiles(shape: tuple[int, ...], world: int) -> list[list[Region]]:
    """Cut along every dimension in two, and deal the boxes out."""
    found: list[list[Region]] = [[] for _ in range(world)]
    halves = [((0, size // 2), (size // 2, size - size // 2)) for size in shape]
    for number, corner in enumerate(itertools.product(*halves)):
        found[number % world].append(Box(tuple(begin for begin, _ in corner), tuple(length for _, length in corner)))
    return found


def spans(shape: tuple[int, ...], world: int) -> list[list[Region]]:
    """Cut the flattened tensor, wherever that is."""
    total = math.prod(shape)
    ends = [total * rank // world for rank in range(world + 1)]
    return [[Span(a, b)] for a, b in itertools.pairwise(ends)]


def values_of(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """Return a region's values out of the whole."""
    if isinstance(region, Span):
        return tensor.reshape(-1)[region.start : region.stop]
    return tensor[tuple(slice(a, a + n) for a, n in zip(region.offsets, region.lengths, strict=True))]


def cut_snapshot(snapshot: Snapshot, world: int, cut: Cut = rows) -> list[Snapshot]:
    """Return what each of `world` ranks would save; tensors without dimensions stay whole."""
    known: dict[int, list[TensorShards]] = {}

    def pieces(tensor: torch.Tensor) -> list[TensorShards]:
        if id(tensor) not in known:
            shape = tuple(tensor.shape)
            known[id(tensor)] = [
                TensorShards(shape, tensor.dtype, tuple((region, values_of(tensor, region)) for region in regions))
                for regions in cut(shape, world)
            ]
        return known[id(tensor)]

    def share(tree: Any, rank: int) -> Any:
        return map_tensors(lambda tensor: pieces(tensor)[rank] if tensor.dim() else tensor, tree)

    return [
        replace(
            snapshot,
            model=None if snapshot.model is None else share(dict(snapshot.model), rank),
            optimizers=[
                {**tree, "state": share(tree["state"], rank)} if isinstance(tree, Mapping) else tree
                for tree in snapshot.optimizers
            ],
            in_shards=True,
        )
        for rank in range(world)
    ]


def write_in_pieces(path: Path, snapshot: Snapshot, world: int = 2, cut: Cut = rows) -> Path:
    """Write a snapshot as `world` ranks do, one after the other."""
    shares = [plan_share(part, rank) for rank, part in enumerate(cut_snapshot(snapshot, world, cut))]
    with Draft(path) as draft:
        draft.make_folders(shares[0])
        entries = {}
        for share in reversed(shares):
            entries |= write_files(draft.folder, share.files)
        draft.publish(shares[0], entries)
    return path
