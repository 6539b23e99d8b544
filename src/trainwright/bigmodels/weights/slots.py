"""Offloaded tensors: the placeholder between two forwards, the tensor during one, and the original afterwards.

The placeholder in the module defines the dtype and `requires_grad` of the weight that replaces it. A tensor with values
that a user assigns instead is used. Gradients of offloaded weights are dropped as soon as they are computed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from trainwright.bigmodels.weights.offloaded_parameters import OffloadedParameter, unguard

_META = torch.device("meta")


class _Origin(NamedTuple):
    """The device of the tensor that a placeholder replaces, and the tensor if it still exists."""

    device: torch.device
    tensor: TensorWeakRef | None = None


# Modules that share a parameter share its placeholder, and share the parameter again when it is restored.
_PLACEHOLDERS: MutableMapping[torch.Tensor, torch.Tensor] = WeakTensorKeyDictionary()
_ORIGINS: MutableMapping[torch.Tensor, _Origin] = WeakTensorKeyDictionary()


@dataclass(slots=True)
class Slot:
    """A parameter or buffer that is offloaded between two forwards.

    Attributes:
        name: Within the hook's module: `path`, a dot, and `leaf`. The path is empty for the module's own tensors.
        placeholder: The meta tensor that replaced it.
        origin: The tensor that it replaced, and the tensor's device.
        former: The tensor that it replaced, if the weights map returns the same memory.
        is_shared: True if a module that is not offloaded has `former` too. Its gradients are then kept.
    """

    name: str
    path: str
    leaf: str
    is_buffer: bool
    placeholder: torch.Tensor
    origin: _Origin
    former: torch.Tensor | None = None
    is_shared: bool = False

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, is_buffer: bool, value: torch.Tensor) -> Slot:
        """Return the slot of a module's `tensor`, for which the weights map returns `value`."""
        path, _, leaf = name.rpartition(".")
        if tensor.is_meta:
            return cls(name, path, leaf, is_buffer, tensor, _ORIGINS.get(tensor, _Origin(_META)))
        placeholder, origin = _placeholder_of(tensor), _Origin(tensor.device, TensorWeakRef(tensor))
        _ORIGINS[placeholder] = origin
        is_same = tensor.device == value.device and tensor.data_ptr() == value.data_ptr()
        return cls(name, path, leaf, is_buffer, placeholder, origin, tensor if is_same else None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Slot:
        placeholder, former = copy.deepcopy((self.placeholder, self.former), memo)
        return replace(self, placeholder=placeholder, origin=_Origin(self.origin.device), former=former)

    def table(self, module: nn.Module) -> dict[str, Any]:
        """Return the dict of parameters or buffers that contains the tensor."""
        owner = module.get_submodule(self.path) if self.path else module
        return owner._buffers if self.is_buffer else owner._parameters

    def replaced(self, module: nn.Module, value: torch.Tensor, span: Any) -> Slot:
        """Return the slot for another value, whose placeholder is in the module already.

        `span` is the location of the value in a file. None: the value is in memory, and is restored there.
        """
        device = self.origin.device if span is not None else value.device
        origin = _Origin(device, self.origin.tensor)
        shown = self.table(module)[self.leaf]
        _ORIGINS[shown] = origin
        return replace(self, placeholder=shown, origin=origin, former=None, is_shared=False)

    def weight(self, shown: torch.Tensor, value: torch.Tensor, *, records: bool, for_user: bool) -> torch.Tensor:
        """Return the tensor for the module. Call it outside of inference mode and with gradients disabled.

        `value` is on the device of the forward. With `records`, autograd may record the use for a backward; the
        gradient is dropped unless it is `for_user`, outside of a forward.
        """
        former = self.former
        if (
            former is not None
            and former.device == value.device
            and former.dtype == shown.dtype
            and former.requires_grad == shown.requires_grad
            and (self.is_shared or not former.requires_grad)
        ):
            return former
        weight = like(shown, value.to(shown.dtype))
        if records and not for_user and weight.requires_grad and weight.is_leaf and not weight.is_inference():
            weight.register_post_accumulate_grad_hook(_drop_gradient)  # type: ignore[no-untyped-call]  # torch's
        return weight

    def restore(self, module: nn.Module, stored: torch.Tensor, *, copies: bool = True) -> None:
        """Put the tensor back into the module. A value that a user has assigned stays.

        With `copies`, values are copied to the device where the tensor was, and a tensor that was on the meta device
        stays there. Otherwise the tensor uses the memory of `stored`.
        """
        table = self.table(module)
        shown = table.get(self.leaf)
        if shown is None or not shown.is_meta:
            return
        if self.former is None and copies and self.origin.device == _META:
            unguard(shown)
            return
        original = original_of(self.placeholder) if self.former is None else self.former
        if original is None:
            value = _copied_as(shown, stored, self.origin.device) if copies else stored.detach().to(shown.dtype)
            original = like(shown, value)
            _ORIGINS[self.placeholder] = _Origin(self.origin.device, TensorWeakRef(original))
        else:
            _follow(original, shown)
            if original is not self.former and copies:
                original.data.copy_(stored)
            elif original is not self.former:
                original.data = stored.to(shown.dtype)
        table[self.leaf] = original

    def keep_origin(self) -> None:
        """Record the tensor that the placeholder replaces, for a later call of `restored`."""
        _ORIGINS.setdefault(self.placeholder, self.origin)


def original_of(placeholder: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor that a placeholder replaces, if it still exists."""
    origin = _ORIGINS.get(placeholder)
    return None if origin is None or origin.tensor is None else origin.tensor()


def restored(placeholder: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return the tensor that a placeholder replaces, or a new one if it was deleted, with the memory of `value`."""
    original = original_of(placeholder)
    if original is None:
        return like(placeholder, value)
    _follow(original, placeholder)
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


def _placeholder_of(tensor: torch.Tensor) -> torch.Tensor:
    found = _PLACEHOLDERS.get(tensor)
    if found is None or found.shape != tensor.shape:
        found = _PLACEHOLDERS[tensor] = like(tensor, torch.empty_like(tensor, device=_META))
    _follow(found, tensor)  # it may have been made for an earlier offload
    return found


def _follow(tensor: torch.Tensor, shown: torch.Tensor) -> None:
    """Set a tensor's dtype and `requires_grad` to those of another one, in place."""
    if tensor.dtype != shown.dtype:
        if tensor.grad is not None:
            tensor.grad = None if not shown.is_floating_point() else tensor.grad.to(shown.dtype)
        tensor.data = tensor.data.to(shown.dtype)
    if isinstance(shown, nn.Parameter) and tensor.requires_grad != shown.requires_grad:
        tensor.requires_grad_(shown.requires_grad)


def like(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Convert `value` to a parameter with the class and attributes of `tensor`, or return it if that is a buffer."""
    if value.is_inference() and not torch.is_inference_mode_enabled():
        with torch.inference_mode():  # inference tensors can become parameters only in this mode
            return like(tensor, value)
    if not isinstance(tensor, nn.Parameter):
        return value
    # A tensor subclass can be a Parameter by an attribute that torch sets, without being of a class derived from it.
    if type(tensor) in (nn.Parameter, OffloadedParameter) or not issubclass(type(tensor), nn.Parameter):
        return nn.Parameter(value, requires_grad=tensor.requires_grad)
    return type(tensor)(value, requires_grad=tensor.requires_grad, **tensor.__dict__)


def put(module: nn.Module, name: str, value: torch.Tensor) -> None:
    """Replace a parameter or buffer. Avoids `setattr`, which searches all tables of the module."""
    owner, leaf = (module, name) if "." not in name else owner_of(module, name)
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


def place(module: nn.Module, name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Move a parameter in place, so that other references follow, or replace a buffer by a copy on the device."""
    if tensor.device == device:
        return
    if isinstance(tensor, nn.Parameter):
        tensor.data = tensor.data.to(device)
    else:
        put(module, name, like(tensor, tensor.detach().to(device)))


def owner_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the submodule that contains the tensor `name`, and the tensor's name in it."""
    path, _, leaf = name.rpartition(".")
    return (module.get_submodule(path) if path else module), leaf


def existing_placeholder(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the placeholder that replaces a parameter in offloaded modules that share it, if there is one."""
    return _PLACEHOLDERS.get(tensor)
