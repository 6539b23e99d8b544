"""Load values into tensors of a model that are on the meta device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from trainwright.bigmodels.weights.slots import put, restored
from trainwright.core.errors import CheckpointError

_SHOWN = 5  # names in a message


def with_tied_names(model: nn.Module, values: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Add the values of tied parameters under all of their names, because safetensors files store them under one."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    added: dict[str, torch.Tensor] = {}
    for same in names.values():
        known = next((name for name in same if name in values), None)
        if known is not None:
            added |= {name: values[known] for name in same if name not in values}
    return {**values, **added} if added else values


def fill_empty(model: nn.Module, names: Iterable[str], *sources: Mapping[str, torch.Tensor]) -> None:
    """Replace meta tensors of a model by tensors on the CPU that share the memory of the first source with the name.

    Tied parameters stay tied. Tensors that have values keep them.

    Raises:
        CheckpointError: No source has a tensor, or its shape differs. Other tensors may have been replaced.
    """
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    tied: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.is_meta:
            tied.setdefault(id(tensor), []).append(name)
    filled: set[int] = set()
    missing = []
    for name in names:
        tensor = tensors[name]
        if not tensor.is_meta or id(tensor) in filled:
            continue
        value = _find(tied[id(tensor)], sources)
        if value is None:
            missing.append(name)
            continue
        if value.shape != tensor.shape:
            raise CheckpointError(
                f"{name!r} has shape {tuple(value.shape)} in the given values and {tuple(tensor.shape)} in the model."
            )
        new = restored(tensor, value.detach().to("cpu", tensor.dtype))
        for same in tied[id(tensor)]:
            put(model, same, new)
        filled.add(id(tensor))
    if missing:
        shown = ", ".join(map(repr, missing[:_SHOWN])) + (" …" if len(missing) > _SHOWN else "")
        raise CheckpointError(
            f"{len(missing)} tensors have no values: {shown}. They are on the meta device, and the device map does not "
            "put them on the disk. Load a checkpoint first (load_checkpoint_and_dispatch), pass a state_dict that "
            "contains them, or offload buffers too (offload_buffers=True)."
        )


def _find(names: Iterable[str], sources: Iterable[Mapping[str, torch.Tensor]]) -> torch.Tensor | None:
    names = list(names)
    for source in sources:
        for name in names:
            if name in source and not source[name].is_meta:
                return source[name]
    return None
