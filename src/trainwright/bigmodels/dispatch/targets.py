"""The parameters and buffers of a model as a checkpoint fills them: in modules, or where hooks keep them away."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from trainwright.bigmodels.dispatch.align import AlignDevicesHook, offloading_hooks
from trainwright.bigmodels.weights.mapped_file import FileSpan
from trainwright.bigmodels.weights.slots import like, put, stand_in
from trainwright.bigmodels.weights.stored_weights import StoredWeights


class Kept(NamedTuple):
    """A weight that a hook keeps away: its name in the hook's module, its value, and where that lies in a file."""

    hook: AlignDevicesHook
    module: nn.Module
    name: str
    value: torch.Tensor
    span: FileSpan | None


@dataclass(slots=True)
class Target:
    """A parameter or buffer to be filled: its names in the model (several where modules share it) and what is there."""

    tensor: torch.Tensor
    is_buffer: bool
    names: list[str] = field(default_factory=list)
    source: str | None = None  # its name in the checkpoint
    device: torch.device | None = None  # None: on the disk
    dtype: torch.dtype = torch.float32
    kept: list[Kept] = field(default_factory=list)  # where no module has it at hand


def find_targets(model: nn.Module) -> list[Target]:
    """Return the model's parameters and persistent buffers, each once, with all its names."""
    found: dict[int, Target] = {}
    same: dict[int, torch.Tensor] = {}  # by the id of what stands in a parameter's place in some modules
    for parameter in model.parameters():
        if not parameter.is_meta and (placeholder := stand_in(parameter)) is not None:
            same[id(placeholder)] = parameter
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
                    target.kept.append(Kept(hook, module, name, value, span))
    return list(found.values())


def lies_in_a_file(target: Target) -> bool:
    """Say whether a target is kept away on the disk."""
    return any(kept.span is not None for kept in target.kept)


def new_value(target: Target, stored: StoredWeights) -> torch.Tensor | None:
    """Return a new value for a target; None where its own memory is written over instead."""
    assert target.source is not None
    assert target.device is not None
    if is_written_over(target):
        return None
    value = stored[target.source]
    # safetensors files are replaced when they are written; torch.save cuts the file that it writes to, and touching a
    # view of a file beyond its end kills the process.
    is_of_torch = stored.locate(target.source) is None
    return value.to(target.device, target.dtype, copy=is_of_torch and value.device == target.device)


def is_written_over(target: Target) -> bool:
    """Say whether a target has memory of its own where it belongs."""
    tensors = [kept.value for kept in target.kept] or [target.tensor]
    here = all(each.device == target.device and each.dtype == target.dtype for each in tensors)
    return here and not lies_in_a_file(target)


def assign(model: nn.Module, target: Target, value: torch.Tensor) -> None:
    """Put a new value into all of a target's places."""
    new = like(target.tensor, value)
    for name in target.names:
        put(model, name, new)


@torch.no_grad()
def fill(model: nn.Module, target: Target, stored: StoredWeights) -> None:
    """Write over the memory of a target."""
    assert target.source is not None
    for value in {id(kept.value): kept.value for kept in target.kept}.values():
        value.copy_(stored[target.source])
    for kept in target.kept:
        kept.hook.forget()
    if not target.kept:
        target.tensor.copy_(stored[target.source])
        for name in target.names:  # also where it was kept away: hooks use what stands there
            put(model, name, target.tensor)


def keep_away(model: nn.Module, target: Target, value: torch.Tensor, span: FileSpan | None) -> None:
    """Put placeholders into all of a target's places, and have hooks that keep it away keep a new value.

    Args:
        model: the target's.
        target: on the disk, or kept away.
        value: as it is stored.
        span: where it lies in a file, for one on the disk.
    """
    assign(model, target, torch.empty(target.tensor.shape, dtype=target.dtype, device="meta"))
    for kept in target.kept:
        kept.hook.replace(kept.module, kept.name, value, span)
