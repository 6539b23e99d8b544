"""Division of a list, a tensor, a data set, or a dict of these over processes."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sized
from typing import Any

import torch

from trainwright.core.errors import ConfigurationError


def share_of(inputs: object, rank: int, num_processes: int, *, pad: bool = False) -> Any:
    """Return one process's part of `inputs`; see `PartialState.split_between_processes`."""
    length = _length(inputs, "inputs")
    if num_processes == 1:
        return inputs
    # 8 items for 3 processes: the first two receive 3 items, the last one 2.
    smallest, remainder = divmod(length, num_processes)
    start = rank * smallest + min(rank, remainder)
    is_larger = rank < remainder
    stop = start + smallest + (1 if is_larger else 0)
    if not pad or remainder == 0 or is_larger:
        return _cut(inputs, start, stop, [])
    # Repeat the last item of the part. With fewer items than processes, the part may be empty: repeat the last of all.
    last = stop - 1 if stop > start else length - 1
    return _cut(inputs, start, stop, [last])


def _length(inputs: object, name: str) -> int:
    """Return the common length of the values in `inputs`."""
    if isinstance(inputs, Mapping):
        lengths = {key: _length(value, f"{name}[{key!r}]") for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            text = ", ".join(f"{key!r}: {length}" for key, length in lengths.items())
            raise ConfigurationError(f"{name} has values of different lengths ({text}). They must have equal lengths.")
        return next(iter(lengths.values()), 0)
    if isinstance(inputs, torch.Tensor) and inputs.dim() == 0:
        raise TypeError(f"{name} is a tensor without a dimension, which cannot be split. Add a dimension.")
    if isinstance(inputs, (list, tuple, torch.Tensor)):
        return len(inputs)
    if isinstance(inputs, Sized) and callable(getattr(inputs, "select", None)):  # datasets.Dataset
        return len(inputs)
    raise TypeError(
        f"{name} is of type {type(inputs).__name__}, which cannot be split between processes. Pass a list, a tuple, a "
        "tensor, a datasets.Dataset, or a dict of these."
    )


def _cut(inputs: Any, start: int, stop: int, repeated: list[int]) -> Any:
    """Return the items from `start` to `stop`, and then those at the indices `repeated`."""
    if isinstance(inputs, Mapping):
        part: Any = copy.copy(inputs)  # keeps the type, such as BatchEncoding
        for key, value in inputs.items():
            part[key] = _cut(value, start, stop, repeated)
        return part
    if isinstance(inputs, torch.Tensor):
        if not repeated:
            return inputs[start:stop]  # a view
        return torch.cat([inputs[start:stop], inputs[repeated]])
    if isinstance(inputs, (list, tuple)):
        items = [*inputs[start:stop], *(inputs[index] for index in repeated)]
        return tuple(items) if isinstance(inputs, tuple) else items
    return inputs.select([*range(start, stop), *repeated])
