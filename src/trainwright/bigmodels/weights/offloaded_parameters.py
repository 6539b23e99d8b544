"""Placeholders for offloaded weights, which raise an error if they are used in a computation.

A module may use a weight of another module without calling it, such as a head that multiplies by an embedding's weight.
The weight is then a meta tensor, because hooks load it only while its own module is called. torch's CPU kernels accept
a meta tensor among their arguments without an error, and return uninitialized memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from trainwright.core.errors import ConfigurationError

_NAME = "_offloaded_name"
_data: Any = torch.Tensor.data
# Functions that use only the shape, dtype or device of a meta argument, and those that copy or build state dicts use.
_ALLOWED = frozenset(
    {"copy_", "to", "type_as", "expand_as", "view_as", "reshape_as", "result_type", "is_same_size", "__set__", "detach"}
)


def _call_checked(
    function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Call a torch function on placeholders; its results are placeholders too. Raise if an argument has values."""
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

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as an ordinary meta tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            plain: Any = self.as_subclass(torch.Tensor)
            return plain.__reduce_ex__(protocol)


def guard(tensor: torch.Tensor, name: str) -> None:
    """Make a meta tensor a placeholder for the weight `name`. Does nothing for subclasses of other libraries."""
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


def _has_values(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_values, value))
    return isinstance(value, torch.Tensor) and not value.is_meta and value.dim() > 0


def _marked(value: Any, args: Iterable[Any]) -> Any:
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
