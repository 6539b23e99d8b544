"""The parameters and buffers of a model. They are in modules, in files, or offloaded by hooks."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from trainwright.bigmodels.dispatch.align import AlignDevicesHook, offloading_hooks
from trainwright.bigmodels.weights.placeholders import partly_offloaded, replaced_weight
from trainwright.bigmodels.weights.stored_weights import FileSpan, StoredWeights
from trainwright.core.errors import CheckpointError

PathLike = str | os.PathLike[str]


class HookedValue(NamedTuple):
    """A weight that a hook offloads."""

    hook: AlignDevicesHook
    module: nn.Module  # the hook's module
    name: str  # in the hook's module
    value: torch.Tensor
    span: FileSpan | None  # location of the value in a file. None if it is in memory.


@dataclass(slots=True)
class Weight:
    """A parameter or buffer of a model.

    Attributes:
        tensor: The tensor in the model, which may be a placeholder. If some modules have a parameter and others its
            placeholder, this is the parameter.
        is_buffer: True for buffers.
        is_saved: False for buffers that are not in state dicts.
        names: Names in the model. Several if modules share the tensor.
        source: Its name in the checkpoint. `match` sets it. None: the checkpoint does not contain it.
        device: Its final device. `WeightPlaces` sets it. None: it stays on the disk.
        dtype: Its dtype after loading. `choose_dtype` sets it.
        hooked: Its values in hooks. Empty if no hook offloads it.
    """

    tensor: torch.Tensor
    is_buffer: bool
    is_saved: bool = True
    names: list[str] = field(default_factory=list)
    source: str | None = None
    device: torch.device | None = None
    dtype: torch.dtype = torch.float32
    hooked: list[HookedValue] = field(default_factory=list)

    @property
    def is_hooked_on_disk(self) -> bool:
        """True if a hook loads the weight from a file."""
        return any(each.span is not None for each in self.hooked)

    @property
    def value_in_file(self) -> torch.Tensor | None:
        """The value of a weight that is only in a file and has no hook, or None."""
        replaced = replaced_weight(self.tensor)
        return None if replaced is None else replaced.value

    @property
    def has_values(self) -> bool:
        """False if the weight is on the meta device and neither a hook nor a file has its value."""
        return not self.tensor.is_meta or bool(self.hooked) or self.value_in_file is not None

    def find_in(self, values: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Return the weight's value in a state dict, or None.

        State dicts may contain only one name of tied weights. If they contain several, the last one is used, as in
        `load_state_dict`. Meta tensors are skipped.
        """
        for name in reversed(self.names):
            if name in values and not values[name].is_meta:
                return values[name]
        return None

    def choose_dtype(self, dtype: torch.dtype | None, keep_in_fp32: Collection[str]) -> None:
        """Choose the dtype after loading: float32 in the modules `keep_in_fp32`, else `dtype`, or the current dtype.

        Weights that are not floating-point keep theirs.
        """
        self.dtype = self.tensor.dtype
        if not self.tensor.is_floating_point():
            return
        if any(_within(name, keep_in_fp32) for name in self.names):
            self.dtype = torch.float32
        elif dtype is not None:
            self.dtype = dtype


def find_weights(model: nn.Module) -> list[Weight]:
    """Return the model's parameters and buffers, each once, with all its names."""
    found: dict[int, Weight] = {}  # by the id of the tensor, which modules with tied weights share
    # Placeholders count as the parameter that they replace, if another module has it.
    same = partly_offloaded(model)
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, shown in module._parameters.items():
            if shown is not None:
                parameter = same.get(id(shown), shown)
                found.setdefault(id(parameter), Weight(parameter, False)).names.append(prefix + name)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                is_saved = name not in module._non_persistent_buffers_set
                found.setdefault(id(buffer), Weight(buffer, True, is_saved)).names.append(prefix + name)
    for module in model.modules():
        for hook in offloading_hooks(module):
            for name, shown, value, span in hook.offloaded(module):
                # None if the value is assigned by a user, and for placeholders in `same`, whose hooks share the memory
                # of the parameter.
                weight = found.get(id(shown))
                if weight is not None and shown.is_meta:
                    weight.hooked.append(HookedValue(hook, module, name, value, span))
    return list(found.values())


def new_value(weight: Weight, stored: StoredWeights) -> torch.Tensor | None:
    """Return the tensor that replaces a weight, or None if the weight is overwritten in place."""
    assert weight.source is not None
    assert weight.device is not None
    # Memory on the final device in the final dtype is overwritten.
    tensors = [each.value for each in weight.hooked] or [weight.tensor]
    fits = all(each.device == weight.device and each.dtype == weight.dtype for each in tensors)
    if fits and not weight.is_hooked_on_disk:
        return None
    value = stored[weight.source]
    # Copy from files of torch.save, because writing such a file truncates it first, and access to a view beyond the end
    # of a file kills the process. Writers of safetensors replace the file.
    is_torch_file = stored.locate(weight.source) is None
    return value.to(weight.device, weight.dtype, copy=is_torch_file and value.device == weight.device)


def compare(weights: list[Weight], stored: StoredWeights, checkpoint: PathLike) -> None:
    """Raise CheckpointError if shapes or kinds of dtypes of model and checkpoint differ. See `_kind`."""
    wrong: list[str] = []
    for weight in weights:
        assert weight.source is not None
        value = stored[weight.source]
        if value.shape != weight.tensor.shape:
            wrong.append(f"{weight.source!r} has shape {tuple(value.shape)}, expected {tuple(weight.tensor.shape)}")
        elif _kind(value) != _kind(weight.tensor):
            wrong.append(f"{weight.source!r} is {value.dtype}, expected {weight.tensor.dtype}")
    if wrong:
        shown = 10
        more = f"; and {len(wrong) - shown} more" if len(wrong) > shown else ""
        raise CheckpointError(f"{checkpoint} does not match the model: {'; '.join(wrong[:shown])}{more}.")


def _kind(tensor: torch.Tensor) -> str:
    """Return the kind of a tensor's dtype. Loading converts only between dtypes of one kind."""
    if tensor.is_complex():
        return "complex"
    return "floating" if tensor.is_floating_point() else "integer"


def _within(name: str, modules: Iterable[str]) -> bool:
    """Return whether a weight is in a module of one of these names: `"a.norm.weight"` is in `"norm"` and `"a.norm"`."""
    return any(name == module or f".{module}." in f".{name}" for module in modules)
