"""Tables of a module: put tensors into them, and exchange offloaded tensors for a forward.

A table is a module's `_parameters` or `_buffers`. In this package, `shown` is the tensor that the table has now: the
slot's placeholder, or its conversion by the user (`model.half()`). It defines the dtype and `requires_grad` of the
weight that replaces it in a forward. If a user assigns a tensor with values, this tensor is used instead. Gradients of
offloaded weights are discarded as soon as they are computed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from trainwright.bigmodels.weights.placeholders import (
    Placeholders,
    ReplacedWeight,
    like,
    replaced_weight,
    set_replaced_weight,
)

_META = torch.device("meta")


@dataclass(slots=True)
class Slot:
    """A parameter or buffer that is offloaded between two forwards.

    Attributes:
        name: Name in the hook's module: `path`, a dot, and `leaf`. `path` is empty for the module's own tensors.
        path: Name of the submodule that contains the tensor, in the hook's module.
        leaf: Name of the tensor in that submodule.
        is_buffer: The tensor is a buffer, not a parameter.
        placeholder: The meta tensor that replaced the original tensor. `replaced` creates a slot with another one.
        former: The original tensor, if the weights map returns the same memory. Otherwise None. It keeps this memory
            alive between forwards, and returns to the module when the hook is removed.
        is_shared: True if a module that is not offloaded also contains `former`. Gradients are then not discarded. The
            hook in `align.py` sets it.
    """

    name: str
    path: str
    leaf: str
    is_buffer: bool
    placeholder: torch.Tensor
    former: torch.Tensor | None = None
    is_shared: bool = False

    @classmethod
    def of(
        cls, name: str, tensor: torch.Tensor, is_buffer: bool, value: torch.Tensor, placeholders: Placeholders
    ) -> Slot:
        """Return the slot of a module's `tensor`, for which the weights map returns `value`."""
        path, _, leaf = name.rpartition(".")
        placeholder = placeholders.replace(tensor)
        is_same = not tensor.is_meta and tensor.device == value.device and tensor.data_ptr() == value.data_ptr()
        return cls(name, path, leaf, is_buffer, placeholder, tensor if is_same else None)

    @property
    def replaced_weight(self) -> ReplacedWeight:
        """The weight that the placeholder replaces."""
        replaced = replaced_weight(self.placeholder)
        assert replaced is not None
        return replaced

    def mark(self, module: nn.Module) -> None:
        """Record in the placeholder that a hook of `module` loads the weight."""
        replaced = self.replaced_weight
        replaced.is_hooked = True
        replaced.label = f"{self.name!r} of {type(module).__name__}"  # for errors

    def __deepcopy__(self, memo: dict[int, Any]) -> Slot:
        placeholder, former = copy.deepcopy((self.placeholder, self.former), memo)
        if replaced_weight(placeholder) is None:  # a subclass of tensors whose copies lack the attribute
            set_replaced_weight(placeholder, copy.deepcopy(self.replaced_weight, memo))
        return replace(self, placeholder=placeholder, former=former)

    def table(self, module: nn.Module) -> dict[str, Any]:
        """Return the dict of parameters or buffers that contains the tensor."""
        owner = module.get_submodule(self.path) if self.path else module
        return owner._buffers if self.is_buffer else owner._parameters

    def replaced(self, module: nn.Module) -> Slot:
        """Return a slot for a new value in the weights map. The module must already have the placeholder for it."""
        return replace(self, placeholder=self.table(module)[self.leaf], former=None, is_shared=False)

    def weight(self, shown: torch.Tensor, value: torch.Tensor, *, records: bool, for_user: bool) -> torch.Tensor:
        """Return the weight that replaces `shown` for a use. Call without gradients and outside of inference mode.

        Args:
            shown: The meta tensor in the module.
            value: The value, on the device of the use.
            records: Autograd may record the use. The weight's gradient is then discarded.
            for_user: The use is outside of a forward. The gradient is kept.
        """
        former = self.former
        if former is not None and self._can_return(former, shown, value.device):
            return former
        weight = like(shown, value.to(shown.dtype))
        discards_gradient = records and not for_user and weight.requires_grad
        accepts_hook = weight.is_leaf and not weight.is_inference()
        if discards_gradient and accepts_hook:
            weight.register_post_accumulate_grad_hook(_drop_gradient)  # type: ignore[no-untyped-call]  # torch's
        return weight

    def _can_return(self, former: torch.Tensor, shown: torch.Tensor, device: torch.device) -> bool:
        """Return whether the original tensor can be used as the weight.

        It is then like the weight, and its gradient is not discarded: it has none, or another module shares the tensor.
        """
        if former.device != device or former.dtype != shown.dtype or former.requires_grad != shown.requires_grad:
            return False
        return self.is_shared or not former.requires_grad

    def restore(self, module: nn.Module, stored: torch.Tensor, *, copies: bool = True) -> None:
        """Put the tensor back into the module, unless a user has assigned a value.

        With `copies`, values are copied to the original device, unless this is the meta device. Otherwise, the tensor
        uses the memory of `stored`.
        """
        table = self.table(module)
        shown = table.get(self.leaf)
        if shown is None or not shown.is_meta:  # a user has removed the tensor, or assigned a value
            return
        if self.former is not None:
            _follow(self.former, shown)
            table[self.leaf] = self.former
            return
        if copies and self.replaced_weight.device == _META:  # the model was created without values
            self._restore_empty(table, shown)
            return
        if copies:
            value = _copied_as(shown, stored, self.replaced_weight.device)
        else:
            value = stored.detach().to(shown.dtype)
        original = restored(self.placeholder, value, shown)
        table[self.leaf] = original
        self.replaced_weight.keep(original)

    def _restore_empty(self, table: dict[str, Any], shown: torch.Tensor) -> None:
        """Put back the meta tensor that the placeholder replaced.

        Without one, the placeholder stays, and raises no more errors unless its weight is in a file.
        """
        original = self.replaced_weight.original()
        self.replaced_weight.is_hooked = False
        if self.replaced_weight.value is None:
            self.replaced_weight.label = None  # ends the checks
        if original is not None:
            _follow(original, shown)
            table[self.leaf] = original


def restored(placeholder: torch.Tensor, value: torch.Tensor, shown: torch.Tensor | None = None) -> torch.Tensor:
    """Return the tensor that a placeholder replaces, or a new tensor if it was deleted. It uses `value`'s memory.

    Dtype and `requires_grad` are those of `shown`. Default: those of the placeholder.
    """
    replaced = replaced_weight(placeholder)
    if shown is None:
        shown = placeholder
    original = None if replaced is None else replaced.original()
    if original is None or original.is_meta:
        return like(shown, value)
    _follow(original, shown)
    original.data = value
    return original


def _drop_gradient(weight: torch.Tensor) -> None:
    weight.grad = None


def _copied_as(shown: torch.Tensor, stored: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy with the dtype and memory format of the tensor in the module. Files store no memory format."""
    value = stored.to(device, shown.dtype, copy=True)
    if value.layout is torch.strided and value.stride() != shown.stride() and value.shape == shown.shape:
        value = torch.empty_strided(shown.shape, shown.stride(), dtype=value.dtype, device=device).copy_(value)
    return value


def _follow(tensor: torch.Tensor, shown: torch.Tensor) -> None:
    """Set a tensor's dtype and `requires_grad` to those of `shown`, in place. A gradient is converted, too."""
    if tensor.dtype != shown.dtype:
        gradient = tensor.grad
        tensor.grad = None  # torch rejects data and a gradient of different dtypes
        tensor.data = tensor.data.to(shown.dtype)
        if gradient is not None and shown.is_floating_point():
            tensor.grad = gradient.to(shown.dtype)
    if isinstance(shown, nn.Parameter) and tensor.requires_grad != shown.requires_grad:
        tensor.requires_grad_(shown.requires_grad)


def put(module: nn.Module, name: str, value: torch.Tensor) -> None:
    """Replace a parameter or buffer. Avoids `setattr`, which searches all tables of the module."""
    owner, leaf = owner_of(module, name)
    if leaf in owner._parameters:
        owner._parameters[leaf] = value  # type: ignore[assignment]  # a Parameter, made by `like`
    else:
        owner._buffers[leaf] = value


def tensors_of(module: nn.Module, *, recurse: bool) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield name, tensor and whether it is a buffer for each tensor of a module, and with `recurse` its submodules."""
    for name, parameter in module.named_parameters(recurse=recurse, remove_duplicate=False):
        yield name, parameter, False
    for name, buffer in module.named_buffers(recurse=recurse, remove_duplicate=False):
        yield name, buffer, True


def move_tensor(module: nn.Module, name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Move a parameter in place, so that other references remain valid. Replace a buffer by a copy on the device."""
    if tensor.device == device:
        return
    if isinstance(tensor, nn.Parameter):
        tensor.data = tensor.data.to(device)
    else:
        put(module, name, like(tensor, tensor.detach().to(device)))


def owner_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the submodule that contains the tensor `name`, and the tensor's name in it."""
    if "." not in name:  # most tensors
        return module, name
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf
