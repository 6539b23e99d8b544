"""Build a model without memory for its weights: on the meta device, or at once where it shall lie.

Initialising weights that a checkpoint replaces a moment later costs memory and time. Two registration hooks of torch,
active only inside the context and in its thread, leave out both: a parameter goes to the device when a module takes it,
before the module initialises it, and one that was there before is kept as the object that it is, so that tied weights
stay tied. What is not made by a module, such as `torch.randn` for a parameter, is made once and then dropped.
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
_TWIN = "_trainwright_moved_to"
_entered = threading.local()


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Build modules in this context without memory for their parameters and without initialising them.

    Parameters are on the meta device, tied ones stay one object; buffers keep their values. Nothing can be computed
    with such a model before weights are loaded into it.

    Args:
        include_buffers: persistent buffers are on the meta device too when the context ends, as a checkpoint brings
            them. Those that no checkpoint holds (`persistent=False`) always keep their values.

    Yields:
        None. Other threads are not affected. Inside of this or of `init_on_device`, the innermost context decides.
    """
    with init_on_device(_META, include_buffers=include_buffers):
        yield


@contextmanager
def init_on_device(device: torch.device | str | int, include_buffers: bool | None = None) -> Iterator[None]:
    """Build modules in this context with their parameters on `device`, so that they are initialised there.

    Args:
        device: of torch. For the meta device see `init_empty_weights`.
        include_buffers: create everything else there too, buffers among it. Without it a parameter is moved when its
            module takes it, and buffers stay where they are made.

    Yields:
        None. Other threads are not affected. Of contexts inside of one another, the innermost one decides.

    Raises:
        RuntimeError: torch does not have the device.
    """
    target = torch.device(device)
    token = object()
    buffers: dict[tuple[int, str], nn.Module] = {}  # whether they are persistent is known when the context ends

    def take_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if not _is_innermost(token) or parameter.device == target:
            return None  # the same object: it may be tied
        return _moved_parameter(parameter, target)

    def take_buffer(module: nn.Module, name: str, buffer: torch.Tensor | None) -> torch.Tensor | None:
        if not _is_innermost(token) or buffer is None or not include_buffers:
            return None
        if target == _META:
            buffers[id(module), name] = module
            return None
        return buffer.to(target)

    with ExitStack() as stack:
        _contexts().append(token)
        stack.callback(_contexts().remove, token)
        # torch annotates what a hook returns as None and takes what it returns all the same.
        on_parameter: Any = take_parameter
        on_buffer: Any = take_buffer
        stack.callback(register_module_parameter_registration_hook(on_parameter).remove)
        stack.callback(register_module_buffer_registration_hook(on_buffer).remove)
        if include_buffers and target != _META:
            stack.enter_context(target)
        yield
        _empty(buffers)


def _empty(buffers: dict[tuple[int, str], nn.Module]) -> None:
    """Put persistent buffers onto the meta device; one that modules share stays one."""
    twins: dict[int, torch.Tensor] = {}
    for (_, name), module in buffers.items():
        buffer = module._buffers.get(name)
        if buffer is not None and name not in module._non_persistent_buffers_set:
            module._buffers[name] = twins.setdefault(id(buffer), buffer.to(_META))


def _contexts() -> list[object]:
    """Return the contexts that this thread is in, innermost last."""
    found: list[object] = _entered.__dict__.setdefault("contexts", [])
    return found


def _is_innermost(token: object) -> bool:
    contexts = _contexts()
    return bool(contexts) and contexts[-1] is token


def _moved_parameter(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Return the one parameter on `device` that stands for this one, wherever it is registered."""
    known: nn.Parameter | None = parameter.__dict__.get(_TWIN)
    if known is not None and known.device == device:
        return known
    kind: Any = type(parameter)
    has_no_shape_yet: bool = is_lazy(parameter)
    twin: nn.Parameter
    if has_no_shape_yet:
        twin = kind(requires_grad=parameter.requires_grad, device=device, dtype=parameter.data.dtype)
    else:
        # Not by calling the class: subclasses of libraries take other arguments.
        twin = torch.Tensor._make_subclass(kind, parameter.data.to(device), parameter.requires_grad)
    twin.__dict__.update({name: value for name, value in parameter.__dict__.items() if name != _TWIN})
    parameter.__dict__[_TWIN] = twin
    return twin
