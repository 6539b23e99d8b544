"""What stands in the place of an offloaded weight, and says so when somebody computes with it.

A module may use a weight of another one without calling that, as a head does that shares an embedding's weight by hand.
torch's kernels for the CPU take a tensor of the meta device among others without an error, and return whatever lies in
memory. So what stands there knows what it is. While it is used the weight itself stands in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from trainwright.core.errors import ConfigurationError

_NAME = "_offloaded_name"
_data: Any = torch.Tensor.data
# What looks at a tensor's shape, dtype or place alone, or is done in its place; and what a state dict holds.
_HARMLESS = frozenset(
    {"copy_", "to", "type_as", "expand_as", "view_as", "reshape_as", "result_type", "is_same_size", "__set__", "detach"}
)


def _refuse_mixed(
    function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Do what torch was asked for, unless a tensor with values takes part; what comes of it knows what it is too."""
    kwargs = kwargs or {}
    name = getattr(function, "__name__", "")
    with torch._C.DisableTorchFunctionSubclass():
        if name not in _HARMLESS and any(_has_values(value) for value in (*args, *kwargs.values())):
            raise ConfigurationError(_message(args, kwargs, name))
        try:
            found = function(*args, **kwargs)
        except NotImplementedError as error:  # values are asked for: by a copy to a device, for another module
            raise ConfigurationError(_message(args, kwargs, name)) from error
        if function == _data.__get__ or (name == "detach" and isinstance(args[0], AwayParameter)):
            return found  # what state dicts and new parameters are made of
        if isinstance(found, (tuple, list)) and type(found) in (tuple, list):
            return type(found)(_marked(each, args) for each in found)
        return _marked(found, args)


class AwayParameter(nn.Parameter):
    """A parameter on the meta device whose weight is offloaded."""

    __torch_function__ = staticmethod(_refuse_mixed)


class AwayTensor(torch.Tensor):
    """A buffer on the meta device whose values are offloaded, or something made of an offloaded weight."""

    __torch_function__ = staticmethod(_refuse_mixed)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy it as what it is; torch's own way makes an ordinary tensor and does not accept it."""
        if id(self) not in memo:
            with torch._C.DisableTorchFunctionSubclass():
                memo[id(self)] = _marked(self.as_subclass(torch.Tensor).clone(), [self])
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle an ordinary tensor of the meta device."""
        with torch._C.DisableTorchFunctionSubclass():
            plain: Any = self.as_subclass(torch.Tensor)
            return plain.__reduce_ex__(protocol)


def guard(tensor: torch.Tensor, name: str) -> None:
    """Have what stands in the place of a weight refuse to be computed with; others than torch's own classes stay."""
    if type(tensor) in _GUARDED:
        tensor.__class__ = _GUARDED[type(tensor)]
        setattr(tensor, _NAME, name)


def unguard(tensor: torch.Tensor) -> None:
    """Make an ordinary tensor of the meta device of it again."""
    if type(tensor) in _PLAIN:
        tensor.__class__ = _PLAIN[type(tensor)]
        tensor.__dict__.pop(_NAME, None)


def without_guard() -> Any:
    """Return a context in which what stands in the place of weights is looked at quickly; nothing is computed there."""
    return torch._C.DisableTorchFunctionSubclass()


_GUARDED: dict[type, type] = {nn.Parameter: AwayParameter, torch.Tensor: AwayTensor}
_PLAIN: dict[type, type] = {guarded: plain for plain, guarded in _GUARDED.items()}


def _has_values(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_values, value))
    return isinstance(value, torch.Tensor) and not value.is_meta and value.dim() > 0


def _marked(value: Any, args: Iterable[Any]) -> Any:
    if type(value) is torch.Tensor and value.is_meta:
        value = value.as_subclass(AwayTensor)
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
        f"{name} is offloaded, and {function} was called with it while it is away: some module uses it without calling "
        "the one that it belongs to. Name the class of the module that uses it in preload_module_classes, so that "
        "its weights come as one, or leave this part in memory (device_map)."
    )
