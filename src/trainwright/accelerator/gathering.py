"""Gathering of the results of one micro-batch per rank, without padding, in the order of the data."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

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
    return list(itertools.chain.from_iterable(processes.gather_object(values)))


def gather_real(tree: object, is_padding: bool, processes: Processes, operation: str = "gather_for_metrics") -> Any:
    """Concatenate the rows of each tensor in `tree` over all ranks, without the rows of padding.

    Collective. Ranks exchange one number on the host, shapes if they differ, and the values of each tensor.

    Args:
        tree: Nested tensors, which may differ between ranks only in the number of rows. A tensor without dimensions has
            one row.
        is_padding: This rank's rows are not gathered: they are padding, or another rank gathers the same rows.
        operation: Name of the operation in error messages.

    Raises:
        TypeError: A leaf is not a tensor. For `gather_for_metrics`, a ConfigurationError.
        ConfigurationError: Dtypes differ, or shapes differ in more than the number of rows. Raised on every rank.
    """
    if processes.world_size == 1:
        return tree
    tensors, problem = _tensors_of(tree, operation)
    names = []  # of the tensors, as `different_calls` expects them: one tuple for each
    for name, leaf in named_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            names.append((name or "the tensor",))
    own_sizes = [_Size(tuple(tensor.shape) or (1,), tensor.dtype, is_padding) for tensor in tensors]
    # A rank with a refused leaf exchanges its error like the others their sizes: if it raised at once, they would wait.
    description = str(problem) if problem else [names, own_sizes]
    if same_on_all_ranks(processes, (operation, description)):  # the usual case: one number is exchanged
        if problem:
            raise problem
        sizes_of_ranks = [own_sizes] * processes.world_size
    else:
        calls = processes.gather_object((operation, str(problem) if problem else names))
        if any(call != calls[0] for call in calls):
            raise problem or different_calls(calls, _HINT)
        sizes_of_ranks = processes.gather_object(own_sizes)
    row_counts = []  # for each tensor, the number of rows of each rank
    for (name,), sizes in zip(names, zip(*sizes_of_ranks, strict=True), strict=True):
        row_counts.append(_rows_of_ranks(f"{operation}: {name}", sizes))
    remaining_counts = iter(row_counts)  # `recursively_apply` visits the tensors in the same order

    def gather_one(tensor: torch.Tensor) -> torch.Tensor:
        counts = next(remaining_counts)
        rows = tensor.detach()
        if rows.dim() == 0:
            rows = rows.reshape(1)
        padded, _ = pad_to(rows[: counts[processes.rank]], max(counts))
        gathered = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(gathered, padded.contiguous(), group=processes.group_for(padded.device))
        return trim(gathered, counts)

    return recursively_apply(gather_one, tree)


class _Size(NamedTuple):
    """Shape and dtype of a tensor of one rank. A tensor without dimensions has the shape `(1,)`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_padding: bool


def _tensors_of(tree: object, operation: str) -> tuple[list[torch.Tensor], Exception | None]:
    """Return the tensors of `tree`, and the error for its first leaf that is not a tensor, or None."""
    tensors: list[torch.Tensor] = []
    errors: list[Exception] = []
    for_metrics = operation == "gather_for_metrics"

    def collect(leaf: object) -> None:
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
        elif for_metrics:
            message = (
                f"gather_for_metrics got tensors and a {type(leaf).__name__}, which it would not gather. Gather "
                "tensors and other objects in two calls, or all with use_gather_object=True."
            )
            errors.append(ConfigurationError(message))
        else:
            message = f"{operation} got a value of type {type(leaf).__name__}. It takes tensors; see gather_object."
            errors.append(TypeError(message))

    # Models return None for outputs that were not requested. gather_for_metrics leaves them as they are.
    recursively_apply(collect, tree, test_type=lambda leaf: leaf is not None or not for_metrics)
    return tensors, errors[0] if errors else None


def _rows_of_ranks(place: str, sizes: Sequence[_Size]) -> list[int]:
    """Return each rank's number of rows that are not padding. Raise an error if ranks differ in more than rows."""
    row_shapes = [size.shape[1:] for size in sizes]
    if len(set(row_shapes)) > 1:
        raise DistributedOperationException(
            f"{place} has rows of different shapes: {_by_process(row_shapes)}. Make the shapes equal with "
            "accelerator.pad_across_processes(tensor, dim=…) first."
        )
    dtypes = [size.dtype for size in sizes]
    if len(set(dtypes)) > 1:
        raise DistributedOperationException(
            f"{place} has different dtypes: {_by_process(dtypes)}. Convert them to one dtype with tensor.to(dtype) "
            "first."
        )
    return [0 if size.is_padding else size.shape[0] for size in sizes]


def _by_process(values: Sequence[object]) -> str:
    return ", ".join(f"{value} on process {rank}" for rank, value in enumerate(values))
