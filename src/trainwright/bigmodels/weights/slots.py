"""Offloaded tensors: a placeholder between forwards, the weight during a forward, the original after offloading ends.

The placeholder in the module defines the dtype and `requires_grad` of the weight that replaces it. If a user assigns a
tensor with values, this tensor is used instead. Gradients of offloaded weights are discarded as soon as they are
computed.

A placeholder raises an error if it is used in a computation. A module may use a weight of another module without
calling it, such as a head that multiplies by an embedding's weight. The weight is then a meta tensor, because hooks
load it only while its own module is called. torch's CPU kernels accept a meta tensor among their arguments without an
error, and return uninitialized memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from trainwright.core.errors import CheckpointError, ConfigurationError

_NAME = "_offloaded_name"
_data: Any = torch.Tensor.data
# Functions that use only the shape, dtype or device of a meta argument, and those that copy or build state dicts use.
_ALLOWED = frozenset(
    {"copy_", "to", "type_as", "expand_as", "view_as", "reshape_as", "result_type", "is_same_size", "__set__", "detach"}
)


def _call_checked(
    function: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Call a torch function on placeholders. The results are placeholders. Raise if another argument has values."""
    kwargs = kwargs or {}
    name = getattr(function, "__name__", "")
    with torch._C.DisableTorchFunctionSubclass():
        if name not in _ALLOWED and any(_has_values(value) for value in (*args, *kwargs.values())):
            raise ConfigurationError(_message(args, kwargs, name))
        try:
            found = function(*args, **kwargs)
        except NotImplementedError as error:  # the function reads values, such as a copy to a device
            raise ConfigurationError(_message(args, kwargs, name)) from error
        if function == _data.__get__ or (name == "detach" and isinstance(args[0], OffloadedParameter)):
            return found  # ordinary tensors, for state dicts and new parameters
        if isinstance(found, (tuple, list)) and type(found) in (tuple, list):
            return type(found)(_marked(each, args) for each in found)
        return _marked(found, args)


class OffloadedParameter(nn.Parameter):
    """A meta tensor that replaces an offloaded parameter."""

    __torch_function__ = staticmethod(_call_checked)


class OffloadedTensor(torch.Tensor):
    """A meta tensor that replaces an offloaded buffer, or a result of a function of offloaded weights."""

    __torch_function__ = staticmethod(_call_checked)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the placeholder. torch's implementation would raise, because its copy is an ordinary tensor."""
        if id(self) not in memo:
            with torch._C.DisableTorchFunctionSubclass():
                memo[id(self)] = _marked(self.as_subclass(torch.Tensor).clone(), [self])
        return memo[id(self)]

    def __reduce_ex__(self, protocol: object) -> Any:
        """Pickle as an ordinary meta tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            plain: Any = self.as_subclass(torch.Tensor)
            return plain.__reduce_ex__(protocol)


def guard(tensor: torch.Tensor, name: str) -> None:
    """Make a meta tensor raise an error when it is used in place of the weight `name`. Ignores other subclasses."""
    if type(tensor) in _GUARDED:
        tensor.__class__ = _GUARDED[type(tensor)]
        setattr(tensor, _NAME, name)


def unguard(tensor: torch.Tensor) -> None:
    """Undo `guard`."""
    if type(tensor) in _PLAIN:
        tensor.__class__ = _PLAIN[type(tensor)]
        tensor.__dict__.pop(_NAME, None)


def without_guard() -> Any:
    """Return a context without the checks of placeholders, in which reading their attributes is fast."""
    return torch._C.DisableTorchFunctionSubclass()


_GUARDED: dict[type, type] = {nn.Parameter: OffloadedParameter, torch.Tensor: OffloadedTensor}
_PLAIN: dict[type, type] = {guarded: plain for plain, guarded in _GUARDED.items()}


def _has_values(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_values, value))
    return isinstance(value, torch.Tensor) and not value.is_meta and value.dim() > 0


def _marked(value: object, args: Iterable[Any]) -> Any:
    if type(value) is torch.Tensor and value.is_meta:
        value = value.as_subclass(OffloadedTensor)
        value.__dict__[_NAME] = _name(args)
    return value


def _name(values: Iterable[Any]) -> str | None:
    for value in values:
        inner = _name(value) if isinstance(value, (list, tuple)) else getattr(value, "__dict__", {}).get(_NAME)
        if inner is not None:
            return str(inner)
    return None


def _message(args: Iterable[Any], kwargs: Mapping[str, Any], function: str) -> str:
    name = _name([*args, *kwargs.values()]) or "a weight"
    return (
        f"{name} is offloaded, and {function} was called with its placeholder: a module uses the weight without "
        "calling the module that it belongs to. Add the class of the module that uses it to preload_module_classes, "
        "or do not offload this weight (device_map)."
    )


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
        name: Name in the hook's module: `path`, a dot, and `leaf`. `path` is empty for the module's own tensors.
        placeholder: The meta tensor that replaced the original tensor.
        origin: The original tensor, and its device.
        former: The original tensor, if the weights map returns the same memory.
        is_shared: True if a module that is not offloaded also contains `former`. Gradients are then not discarded.
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

    def replaced(self, module: nn.Module, value: torch.Tensor, span: object) -> Slot:
        """Return the slot for a new value. The module must already have the meta tensor for it.

        `span` is the location of the value in a file. None means that the value is in memory.
        """
        device = self.origin.device if span is not None else value.device
        origin = _Origin(device, self.origin.tensor)
        shown = self.table(module)[self.leaf]
        _ORIGINS[shown] = origin
        return replace(self, placeholder=shown, origin=origin, former=None, is_shared=False)

    def weight(self, shown: torch.Tensor, value: torch.Tensor, *, records: bool, for_user: bool) -> torch.Tensor:
        """Return the weight that replaces `shown`, the module's meta tensor. Call with gradients disabled.

        Must not be called in inference mode. `value` is on the device of the forward. With `records`, autograd may
        record the use, and the gradient is discarded. It is kept with `for_user`, for a use outside of a forward.
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
        """Put the tensor back into the module, unless a user has assigned a value.

        With `copies`, values are copied to the original device, unless this is the meta device. Otherwise, the tensor
        uses the memory of `stored`.
        """
        table = self.table(module)
        shown = table.get(self.leaf)
        if shown is None or not shown.is_meta:
            return
        if self.former is None and copies and self.origin.device == _META:
            unguard(shown)
            return
        if self.former is not None:
            _follow(self.former, shown)
            table[self.leaf] = self.former
            return
        value = _copied_as(shown, stored, self.origin.device) if copies else stored.detach().to(shown.dtype)
        original = table[self.leaf] = restored(self.placeholder, value, shown)
        _ORIGINS[self.placeholder] = _Origin(self.origin.device, TensorWeakRef(original))

    def keep_origin(self) -> None:
        """Record the tensor that the placeholder replaces, for a later call of `restored`."""
        _ORIGINS.setdefault(self.placeholder, self.origin)


def restored(placeholder: torch.Tensor, value: torch.Tensor, shown: torch.Tensor | None = None) -> torch.Tensor:
    """Return the tensor that a placeholder replaces, or a new tensor if it was deleted. It uses `value`'s memory.

    Dtype and `requires_grad` are those of `shown`: the placeholder, or the user's conversion of it.
    """
    origin, shown = _ORIGINS.get(placeholder), placeholder if shown is None else shown
    original: torch.Tensor | None = None if origin is None or origin.tensor is None else origin.tensor()
    if original is None:
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


def _placeholder_of(tensor: torch.Tensor) -> torch.Tensor:
    found = _PLACEHOLDERS.get(tensor)
    if found is None or found.shape != tensor.shape:
        found = _PLACEHOLDERS[tensor] = like(tensor, torch.empty_like(tensor, device=_META))
    _follow(found, tensor)  # it may have been made for an earlier offload
    return found


def _follow(tensor: torch.Tensor, shown: torch.Tensor) -> None:
    """Set a tensor's dtype and `requires_grad` to those of another tensor, in place."""
    if tensor.dtype != shown.dtype:
        gradient = tensor.grad
        tensor.grad = None  # torch takes a gradient of another dtype only after the data has that dtype
        tensor.data = tensor.data.to(shown.dtype)
        if gradient is not None and shown.is_floating_point():
            tensor.grad = gradient.to(shown.dtype)
    if isinstance(shown, nn.Parameter) and tensor.requires_grad != shown.requires_grad:
        tensor.requires_grad_(shown.requires_grad)


def like(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Convert `value` to a parameter with the class and attributes of `tensor`. Return it unchanged for a buffer."""
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
    path, _, leaf = name.rpartition(".")
    return (module.get_submodule(path) if path else module), leaf


def existing_placeholder(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the placeholder that replaces a parameter in offloaded modules that share it, if there is one."""
    return _PLACEHOLDERS.get(tensor)


_SHOWN = 5  # names in a message


def with_tied_names(model: nn.Module, values: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Add the values of tied parameters under all their names. Safetensors files store only one of the names."""
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
    """Replace meta tensors of a model by CPU tensors, which use the memory of the first source that has their name.

    Tied parameters stay tied. Tensors with values are not changed.

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
                f"{name!r} has shape {tuple(value.shape)} in the given values, expected {tuple(tensor.shape)}."
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
