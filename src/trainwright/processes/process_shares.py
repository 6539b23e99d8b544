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
    each, more = divmod(length, num_processes)
    start = rank * each + min(rank, more)
    stop = start + each + (rank < more)
    missing = each + (more > 0) - (stop - start) if pad else 0
    last = stop - 1 if stop > start else length - 1
    return _cut(inputs, start, stop, [last] * missing)


def _length(inputs: object, name: str) -> int:
    """Return the common length of the values in `inputs`."""
    if isinstance(inputs, Mapping):
        lengths = {key: _length(value, f"{name}[{key!r}]") for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            shown = ", ".join(f"{key!r}: {length}" for key, length in lengths.items())
            raise ConfigurationError(f"{name} has values of different lengths ({shown}). They must have equal lengths.")
        return next(iter(lengths.values()), 0)
    if isinstance(inputs, torch.Tensor) and inputs.dim() == 0:
        raise TypeError(f"{name} is a tensor without a dimension, which cannot be split. Add a dimension.")
    if isinstance(inputs, (list, tuple, torch.Tensor)):
        return len(inputs)
    if isinstance(inputs, Sized) and callable(getattr(inputs, "select", None)):
        return len(inputs)
    raise TypeError(
        f"{name} is of type {type(inputs).__name__}, which cannot be split between processes. Pass a list, a tuple, a "
        "tensor, a datasets.Dataset, or a dict of these."
    )


def _cut(inputs: Any, start: int, stop: int, repeated: list[int]) -> Any:
    if isinstance(inputs, Mapping):
        cut: Any = copy.copy(inputs)
        for key, value in inputs.items():
            cut[key] = _cut(value, start, stop, repeated)
        return cut
    if isinstance(inputs, torch.Tensor):
        part = inputs[start:stop]
        return torch.cat([part, *(inputs[index : index + 1] for index in repeated)]) if repeated else part
    if isinstance(inputs, (list, tuple)):
        items = [*inputs[start:stop], *(inputs[index] for index in repeated)]
        return tuple(items) if isinstance(inputs, tuple) else items
    return inputs.select([*range(start, stop), *repeated])
