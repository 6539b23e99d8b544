"""Gathering of the results of one micro-batch per rank, without padding, in the order of the data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from trainwright.core.errors import ConfigurationError, DistributedOperationException
from trainwright.core.tree import named_leaves
from trainwright.data.padding import pad_to, trim
from trainwright.processes.collectives import compare_calls, different_calls, recursively_apply, same_on_all_ranks
from trainwright.processes.process_group import Processes

_HINT = "Gather the same on every rank."


def gather_objects(values: list[Any], processes: Processes) -> list[Any]:
    """Concatenate the lists of all ranks. Collective. Uses pickle and the host.

    Raises:
        ConfigurationError: A rank gathers tensors instead. Raised on every rank.
    """
    if processes.world_size == 1:
        return values
    compare_calls(processes, "gather_for_metrics", "other objects", _HINT)
    return [value for of_rank in processes.gather_object(values) for value in of_rank]


def gather_real(tree: object, is_padding: bool, processes: Processes, operation: str = "gather_for_metrics") -> Any:
    """Concatenate the rows of each tensor in `tree` over all ranks, without the rows of padding.

    Collective. Ranks exchange one number on the host, shapes if they differ, and the values of each tensor.

    Args:
        tree: Nested tensors, which may differ between ranks only in the number of rows. A tensor without dimensions has
            one row.
        is_padding: This rank's rows are padding.
        operation: Name of the operation in error messages.

    Raises:
        TypeError: A leaf is not a tensor. For `gather_for_metrics`, a ConfigurationError.
        ConfigurationError: Dtypes differ, or shapes differ in more than the number of rows. Raised on every rank.
    """
    if processes.world_size == 1:
        return tree
    leaves: list[torch.Tensor] = []
    refused = _collect(tree, leaves, operation)
    shapes = [(tuple(leaf.shape) or (1,), leaf.dtype, is_padding) for leaf in leaves]
    names = [(name or "the tensor",) for name, leaf in named_leaves(tree) if isinstance(leaf, torch.Tensor)]
    described = str(refused) if refused else [names, shapes]
    if same_on_all_ranks(processes, (operation, described)):
        if refused:
            raise refused
        of_ranks = [shapes] * processes.world_size
    else:
        calls = processes.gather_object((operation, str(refused) if refused else names))
        if any(call != calls[0] for call in calls):
            raise refused or different_calls(calls, _HINT)
        of_ranks = processes.gather_object(shapes)
    places = [f"{operation}: {name}" for (name,) in names]
    counts = [
        _rows_of_ranks(place, of_tensor) for place, of_tensor in zip(places, zip(*of_ranks, strict=True), strict=True)
    ]
    of_tensors = iter(counts)

    def one(tensor: torch.Tensor) -> torch.Tensor:
        of_ranks = next(of_tensors)
        rows = tensor.detach().reshape(-1, *tensor.shape[1:]) if tensor.dim() else tensor.detach().reshape(1)
        padded, _ = pad_to(rows[: of_ranks[processes.rank]], max(of_ranks))
        found = [torch.empty_like(padded) for _ in of_ranks]
        dist.all_gather(found, padded.contiguous(), group=processes.group_for(padded.device))
        return trim(found, of_ranks)

    return recursively_apply(one, tree)


def _collect(tree: object, leaves: list[torch.Tensor], operation: str) -> Exception | None:
    """Append the tensors of `tree` to `leaves`. Return the error for a leaf that is not a tensor, or None."""
    wrong: list[Exception] = []
    for_metrics = operation == "gather_for_metrics"

    def note(leaf: object) -> None:
        if isinstance(leaf, torch.Tensor):
            leaves.append(leaf)
        elif for_metrics:
            message = (
                f"gather_for_metrics got tensors and a {type(leaf).__name__}, which it would not gather. Gather "
                "tensors and other objects in two calls, or all with use_gather_object=True."
            )
            wrong.append(ConfigurationError(message))
        else:
            message = f"{operation} got a value of type {type(leaf).__name__}. It takes tensors; see gather_object."
            wrong.append(TypeError(message))

    recursively_apply(note, tree, test_type=lambda leaf: leaf is not None or not for_metrics)
    return wrong[0] if wrong else None


def _rows_of_ranks(place: str, of_ranks: Sequence[tuple[tuple[int, ...], torch.dtype, bool]]) -> list[int]:
    """Return each rank's number of rows, given (shape, dtype, is_padding) of each rank. Check the other sizes."""
    sizes = [shape[1:] for shape, _, _ in of_ranks]
    if len(set(sizes)) > 1:
        raise DistributedOperationException(
            f"{place} has rows of different shapes: {_by_process(sizes)}. Make the shapes equal with "
            "accelerator.pad_across_processes(tensor, dim=…) first."
        )
    dtypes = [dtype for _, dtype, _ in of_ranks]
    if len(set(dtypes)) > 1:
        raise DistributedOperationException(
            f"{place} has different dtypes: {_by_process(dtypes)}. Convert them to one dtype with tensor.to(dtype) "
            "first."
        )
    return [0 if is_padding else shape[0] for shape, _, is_padding in of_ranks]


def _by_process(values: Sequence[object]) -> str:
    return ", ".join(f"{value} on process {rank}" for rank, value in enumerate(values))
