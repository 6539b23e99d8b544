"""Construction of a model on the meta device, without memory for its weights, or directly on another device.

Initializing weights that a checkpoint replaces costs memory and time. Inside the contexts, and only in their thread,
torch's registration hooks move each parameter to the device when it is assigned to a module, before the module
initializes it. A parameter that is already on the device remains the same object, so that tied weights stay tied. The
values of a parameter such as `nn.Parameter(torch.randn(3))` are created on torch's default device before the move.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy

_META = torch.device("meta")
_TWIN = "_trainwright_moved_to"  # attribute of a parameter with its copy on the device


class _Entered(threading.local):
    """The active contexts of the current thread. `threading.local` calls `__init__` once in each thread."""

    def __init__(self) -> None:
        self.contexts: list[object] = []  # one token for each context, innermost last


_entered = _Entered()


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Return a context in which modules are created on the meta device, without memory for parameters.

    Tied parameters stay tied, and buffers keep their values. Load weights into the model before using it.

    Args:
        include_buffers: Also move persistent buffers to the meta device, at the end of the context. Buffers that are
            not in a checkpoint (`persistent=False`) always keep their values. Default: None, which moves no buffers.

    Yields:
        None. Other threads are not affected. In nested contexts, also of `init_on_device`, the innermost one applies.
    """
    with init_on_device(_META, include_buffers=include_buffers):
        yield


@contextmanager
def init_on_device(device: torch.device | str | int, include_buffers: bool | None = None) -> Iterator[None]:
    """Return a context in which parameters of new modules are created and initialized on `device`.

    Args:
        device: A device of torch. For the meta device, see `init_empty_weights`.
        include_buffers: Also create buffers and all other tensors on the device. On the meta device, only persistent
            buffers are moved, at the end of the context. Default: None, which moves only parameters, when they are
            assigned to a module.

    Yields:
        None. Other threads are not affected. In nested contexts, the innermost one applies.

    Raises:
        RuntimeError: torch does not have the device.
    """
    target = torch.device(device)
    token = object()  # identifies this context, whose hooks torch also calls in other threads and inner contexts
    # The buffers to move at the end of the context, by the module's id and the buffer's name. torch calls the hook
    # before it records whether a buffer is persistent.
    buffers: dict[tuple[int, str], nn.Module] = {}

    def is_innermost() -> bool:
        # False in other threads, whose list is empty or has other tokens.
        return _entered.contexts[-1:] == [token]

    # A hook that returns None leaves the assigned tensor as it is.

    def move_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if not is_innermost() or parameter.device == target:
            return None  # the same object: it may be tied
        return _moved_parameter(parameter, target)

    def move_buffer(module: nn.Module, name: str, buffer: torch.Tensor | None) -> torch.Tensor | None:
        if not include_buffers or buffer is None or not is_innermost():
            return None
        if target == _META:
            buffers[id(module), name] = module
            return None
        return buffer.to(target)

    with ExitStack() as stack:
        _entered.contexts.append(token)
        stack.callback(_entered.contexts.remove, token)
        # torch annotates the hooks as returning None, but uses their result.
        on_parameter: Any = move_parameter
        on_buffer: Any = move_buffer
        stack.callback(register_module_parameter_registration_hook(on_parameter).remove)
        stack.callback(register_module_buffer_registration_hook(on_buffer).remove)
        if include_buffers and target != _META:
            stack.enter_context(target)  # torch then creates all tensors on the device
        yield
        _empty(buffers)  # not after an error


def _empty(buffers: dict[tuple[int, str], nn.Module]) -> None:
    """Move persistent buffers to the meta device. Shared buffers stay shared."""
    # By the id of the buffer with values. All of these exist before the loop, so that no two of them have the same id.
    meta_buffers: dict[int, torch.Tensor] = {}
    for (_, name), module in buffers.items():
        buffer = module._buffers.get(name)
        if buffer is None or name in module._non_persistent_buffers_set:
            continue
        if id(buffer) not in meta_buffers:
            meta_buffers[id(buffer)] = buffer.to(_META)
        module._buffers[name] = meta_buffers[id(buffer)]


def _moved_parameter(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Return the copy of a parameter on `device`. Repeated calls return the same object, so that it stays tied."""
    known: nn.Parameter | None = parameter.__dict__.get(_TWIN)
    if known is not None and known.device == device:
        return known
    kind: Any = type(parameter)
    has_no_shape_yet: bool = is_lazy(parameter)
    twin: nn.Parameter
    if has_no_shape_yet:
        twin = kind(requires_grad=parameter.requires_grad, device=device, dtype=parameter.data.dtype)
    else:
        # Calling the class would fail: subclasses of other libraries have other constructors.
        twin = torch.Tensor._make_subclass(kind, parameter.data.to(device), parameter.requires_grad)
    twin.__dict__.update({name: value for name, value in parameter.__dict__.items() if name != _TWIN})
    parameter.__dict__[_TWIN] = twin
    return twin
