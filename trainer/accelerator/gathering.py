"""Collect what ranks have computed for one micro-batch each: the real rows alone, in the order of the data."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from trainwright.core.errors import ConfigurationError
from trainwright.data import pad_to, trim
from trainwright.strategies.processes.collectives import recursively_apply
from trainwright.strategies.processes.process_group import Processes

_MAX_DIMS = 8


def gather_real(tree: Any, is_padding: bool, processes: Processes) -> Any:
    """Return `tree` with each tensor's rows of all ranks, one rank after the other, without the rows of padding.

    Collective: one exchange of shapes on the host, and one of values for each tensor.

    Args:
        tree: the same on every rank but for the number of rows; a tensor without dimensions has one row.
        is_padding: this rank's rows are none of the data.
        processes: of the run.

    Raises:
        ConfigurationError: shapes differ in more than the number of rows; on every rank alike.
    """
    if processes.world_size == 1:
        return tree
    shapes: list[list[int]] = []
    recursively_apply(lambda leaf: shapes.append(_shape(leaf, is_padding)), tree, test_type=_is_gathered)
    of_ranks = iter(zip(*_exchange(shapes, processes), strict=True))

    def one(tensor: torch.Tensor) -> torch.Tensor:
        counts = [shape[0] for shape in next(of_ranks)]
        rows = tensor.detach().reshape(-1, *tensor.shape[1:]) if tensor.dim() else tensor.detach().reshape(1)
        padded, _ = pad_to(rows[: counts[processes.rank]], max(counts))
        found = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(found, padded.contiguous(), group=processes.group_for(padded.device))
        return trim(found, counts)

    return recursively_apply(one, tree)


def _is_gathered(leaf: Any) -> bool:
    if not isinstance(leaf, torch.Tensor) and leaf is not None:
        raise ConfigurationError(
            f"gather_for_metrics got tensors and a {type(leaf).__name__} beside them, which would stay this process's. "
            "Gather tensors and other objects in two calls, or all with use_gather_object=True."
        )
    return leaf is not None


def _shape(tensor: torch.Tensor, is_padding: bool) -> list[int]:
    if tensor.dim() > _MAX_DIMS:
        raise ConfigurationError(f"a tensor of {tensor.dim()} dimensions cannot be gathered, only up to {_MAX_DIMS}.")
    shape = list(tensor.shape) or [1]
    return [0 if is_padding else shape[0], *shape[1:], *[-1] * (_MAX_DIMS - len(shape))]


def _exchange(shapes: list[list[int]], processes: Processes) -> list[list[list[int]]]:
    """Return every rank's shapes, which differ in the number of rows alone."""
    told = processes.gather_integers([len(shapes)])
    if any(found != told[0] for found in told):
        raise ConfigurationError(
            f"ranks gather different numbers of tensors: {[found[0] for found in told]}. Gather the same on every rank."
        )
    flat = processes.gather_integers([size for shape in shapes for size in shape])
    of_ranks = [[row[i : i + _MAX_DIMS] for i in range(0, len(row), _MAX_DIMS)] for row in flat]
    for of_tensor in zip(*of_ranks, strict=True):
        if any(shape[1:] != of_tensor[0][1:] for shape in of_tensor):
            sizes = [tuple(size for size in shape[1:] if size >= 0) for shape in of_tensor]
            raise ConfigurationError(
                f"ranks gather tensors whose rows have different shapes: {sizes}. Bring them to one with "
                "accelerator.pad_across_processes(tensor, dim=…) first."
            )
    return of_ranks
