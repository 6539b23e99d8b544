"""The parameters and buffers that a checkpoint is loaded into. They are in modules, or are offloaded by hooks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from trainwright.bigmodels.dispatch.align import AlignDevicesHook, offloading_hooks
from trainwright.bigmodels.weights.placeholders import Place, like, place_of, placeholder
from trainwright.bigmodels.weights.slots import put
from trainwright.bigmodels.weights.stored_weights import FileSpan, StoredWeights


class OffloadedValue(NamedTuple):
    """A weight that a hook offloads: its name in the hook's module, its value, and the value's location in a file."""

    hook: AlignDevicesHook
    module: nn.Module
    name: str
    value: torch.Tensor
    span: FileSpan | None


@dataclass(slots=True)
class Target:
    """A parameter or buffer to load."""

    tensor: torch.Tensor
    is_buffer: bool
    names: list[str] = field(default_factory=list)  # in the model; several if modules share it
    source: str | None = None  # its name in the checkpoint
    device: torch.device | None = None  # None: on the disk
    dtype: torch.dtype = torch.float32
    offloaded: list[OffloadedValue] = field(default_factory=list)  # its values in hooks


def find_targets(model: nn.Module) -> list[Target]:
    """Return the model's parameters and persistent buffers, each once, with all its names."""
    found: dict[int, Target] = {}
    same = partly_offloaded(model)
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, shown in module._parameters.items():
            if shown is not None:
                parameter = same.get(id(shown), shown)
                found.setdefault(id(parameter), Target(parameter, False)).names.append(prefix + name)
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found.setdefault(id(buffer), Target(buffer, True)).names.append(prefix + name)
    for module in model.modules():
        for hook in offloading_hooks(module):
            for name, shown, value, span in hook.offloaded(module):
                if (target := found.get(id(shown))) is not None and shown.is_meta:
                    target.offloaded.append(OffloadedValue(hook, module, name, value, span))
    return list(found.values())


def partly_offloaded(model: nn.Module) -> dict[int, torch.Tensor]:
    """Return the id of a placeholder → the parameter that it replaces in some modules, and that others have."""
    parameters = list(model.parameters())
    present = {id(parameter) for parameter in parameters}
    found: dict[int, torch.Tensor] = {}
    for parameter in parameters:
        place = place_of(parameter)
        original = None if place is None else place.original()
        if original is not None and not original.is_meta and id(original) in present:
            found[id(parameter)] = original
    return found


def is_on_disk(target: Target) -> bool:
    """Return whether a target is offloaded to the disk."""
    return any(each.span is not None for each in target.offloaded)


def new_value(target: Target, stored: StoredWeights) -> torch.Tensor | None:
    """Return the tensor that replaces a target, or None if the target is overwritten in place."""
    assert target.source is not None
    assert target.device is not None
    if _is_overwritten(target):
        return None
    value = stored[target.source]
    # Copy from files of torch.save, because writing such a file truncates it first, and access to a view beyond the end
    # of a file kills the process. Writers of safetensors replace the file.
    is_torch_file = stored.locate(target.source) is None
    return value.to(target.device, target.dtype, copy=is_torch_file and value.device == target.device)


def _is_overwritten(target: Target) -> bool:
    """Return whether a target already has memory on its final device in its final dtype."""
    tensors = [each.value for each in target.offloaded] or [target.tensor]
    fits = all(each.device == target.device and each.dtype == target.dtype for each in tensors)
    return fits and not is_on_disk(target)


def assign(model: nn.Module, target: Target, value: torch.Tensor) -> None:
    """Replace a target by a new value under all its names."""
    new = like(target.tensor, value)
    for name in target.names:
        put(model, name, new)


@torch.no_grad()
def fill(model: nn.Module, target: Target, stored: StoredWeights) -> None:
    """Copy a target's value from the checkpoint into its existing memory."""
    assert target.source is not None
    for value in {id(each.value): each.value for each in target.offloaded}.values():
        value.copy_(stored[target.source])
    for each in target.offloaded:
        each.hook.forget()
    if not target.offloaded:
        target.tensor.copy_(stored[target.source])
        for name in target.names:  # also in modules that have a placeholder: their hooks then use the tensor
            put(model, name, target.tensor)


def replace_offloaded(model: nn.Module, target: Target, value: torch.Tensor, span: FileSpan | None) -> None:
    """Replace an offloaded target: the model gets a placeholder under all its names, and the hooks get `value`.

    `span` is the location of `value` in a file. None: the value is in memory.
    """
    former = place_of(target.tensor)
    place = Place() if former is None else Place(former.device, former.original)
    if target.device is None:
        place.value = value
        place.span = span
    else:
        place.device = value.device
    shown = placeholder(target.tensor, place, target.dtype)
    for name in target.names:
        put(model, name, shown)
    for each in target.offloaded:
        each.hook.replace(each.module, each.name, value, span)
