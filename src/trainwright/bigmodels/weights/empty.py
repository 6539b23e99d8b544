"""Build a model without memory for its weights: on the meta device, or at once where it shall lie.

Initialising weights that a checkpoint replaces a moment later costs memory and time. `init_empty_weights` leaves out
both. It works with two hooks and one mode of torch, all of them active only inside the context and in its thread:

- a parameter goes to the device when a module takes it (torch's registration hooks), and one that was there before is
  kept as the object that it is, so that tied weights stay tied;
- large tensors from `torch.empty`, `torch.zeros`, `torch.randn` and the like are *postponed*: only shape and recipe are
  kept until it is clear what they are for. A parameter needs no more; a buffer, or a tensor whose values somebody
  reads, is made by the recipe in the moment it is needed.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

_META = torch.device("meta")
_MIN_POSTPONED = 1024  # elements; below it, making the tensor costs less than remembering how

_FACTORIES = (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn)
_LIKE: dict[Any, Callable[..., torch.Tensor]] = {
    torch.empty_like: torch.empty,
    torch.zeros_like: torch.zeros,
    torch.ones_like: torch.ones,
    torch.full_like: torch.full,
    torch.rand_like: torch.rand,
    torch.randn_like: torch.randn,
}
# In-place fills that need no value of the tensor itself, so that they can be postponed with it.
_FILLS = {
    *(torch.Tensor.zero_, torch.Tensor.fill_, torch.Tensor.normal_, torch.Tensor.uniform_),
    *(getattr(nn.init, name) for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")),
}
_KEPT_KEYWORDS = {"size", "dtype", "device", "fill_value", "names", "layout", "requires_grad", "memory_format"}
# What may be asked of a postponed tensor without making it.
_SHAPE_QUESTIONS = {
    *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.nelement, torch.Tensor.__len__),
    *(torch.Tensor.stride, torch.Tensor.element_size, torch.Tensor.is_floating_point, torch.Tensor.is_complex),
    *(torch.numel, torch.is_floating_point, torch.is_complex),
    *(
        getattr(torch.Tensor, name).__get__
        for name in ("shape", "dtype", "ndim", "layout", "requires_grad", "grad_fn", "is_leaf", "grad")
    ),
}
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
    building = _EmptyBuilding(token, include_buffers=bool(include_buffers)) if target == _META else None

    def take_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if not _is_innermost(token) or parameter.device == target:
            return None  # the same object: it may be tied
        return _moved_parameter(parameter, target)

    def take_buffer(module: nn.Module, name: str, buffer: torch.Tensor | None) -> torch.Tensor | None:
        if not _is_innermost(token) or buffer is None:
            return None
        if building is not None:
            building.note_buffer(module, name, buffer)
            return None
        return buffer.to(target) if include_buffers else None

    with ExitStack() as stack:
        _contexts().append(token)
        stack.callback(_contexts().remove, token)
        # torch annotates what a hook returns as None and takes what it returns all the same.
        parameters: Any = take_parameter
        buffers: Any = take_buffer
        stack.callback(register_module_parameter_registration_hook(parameters).remove)
        stack.callback(register_module_buffer_registration_hook(buffers).remove)
        if building is not None:
            stack.enter_context(building)
        elif include_buffers:
            stack.enter_context(target)
        yield
        if building is not None:
            building.settle()


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


class _Recipe:
    """How a postponed tensor is made."""

    __slots__ = ("factory", "fills", "ref")

    def __init__(self, ref: weakref.ref[torch.Tensor], factory: Callable[[], torch.Tensor]) -> None:
        self.ref = ref
        self.factory = factory
        self.fills: list[Callable[[torch.Tensor], Any]] = []

    def make(self) -> torch.Tensor:
        with torch.no_grad():
            tensor = self.factory()
            for fill in self.fills:
                fill(tensor)
        return tensor


class _EmptyBuilding(TorchFunctionMode):
    """Postpones large tensors, and makes those whose values are needed."""

    def __init__(self, token: object, *, include_buffers: bool) -> None:
        super().__init__()
        self.token = token
        self.include_buffers = include_buffers
        self.recipes: dict[int, _Recipe] = {}  # by the id of a postponed tensor that is alive
        self.buffers: dict[tuple[int, str], nn.Module] = {}
        self.is_making = False

    def note_buffer(self, module: nn.Module, name: str, buffer: torch.Tensor) -> None:
        """Take note of a buffer: make it, or decide when the context ends and it is known whether it is persistent."""
        if self.include_buffers:
            self.buffers[id(module), name] = module
        else:
            self._make(buffer)

    def settle(self) -> None:
        """Make what is still postponed, apart from persistent buffers, which lose their values."""
        twins: dict[int, torch.Tensor] = {}
        for (_, name), module in self.buffers.items():
            buffer = module._buffers.get(name)
            if buffer is None or name in module._non_persistent_buffers_set:
                continue
            if id(buffer) not in twins:
                was_postponed = self.recipes.pop(id(buffer), None) is not None
                twins[id(buffer)] = buffer if was_postponed else buffer.to(_META)
            module._buffers[name] = twins[id(buffer)]
        alive = [recipe.ref() for recipe in list(self.recipes.values())]
        for tensor in alive:
            if tensor is not None:
                self._make(tensor)

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_making:
            return func(*args, **kwargs)
        if not args and func in _FILLS and "tensor" in kwargs:  # torch's init functions pass on names alone
            kwargs = dict(kwargs)
            args = (kwargs.pop("tensor"),)
        is_innermost = _is_innermost(self.token)
        if is_innermost and func in _FACTORIES and kwargs.keys() <= _KEPT_KEYWORDS and not kwargs.get("requires_grad"):
            return self._postpone(func, args, kwargs)
        if is_innermost and func in _LIKE and len(args) >= 1 and args[0].is_meta and id(args[0]) not in self.recipes:
            options = {"dtype": args[0].dtype, **{k: v for k, v in kwargs.items() if k != "memory_format"}}
            if options.keys() <= _KEPT_KEYWORDS:
                return self._postpone(_LIKE[func], (args[0].shape, *args[1:]), options)
        if self.recipes:
            postponed = [tensor for tensor in _tensors_in((args, kwargs)) if id(tensor) in self.recipes]
            if postponed:
                return self._ask(func, args, kwargs, postponed)
        if func in _FILLS and args and args[0].is_meta:
            return args[0]  # there is nothing to fill, which torch takes 200 µs to find out
        return func(*args, **kwargs)

    def _postpone(self, func: Callable[..., torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = kwargs.get("device")
        if device is not None and torch.device(device) == _META:
            return func(*args, **kwargs)
        shape = func(*args, **{**kwargs, "device": _META})
        if shape.numel() < _MIN_POSTPONED or shape.layout is not torch.strided:
            return func(*args, **kwargs)
        key, options = id(shape), {**kwargs, "dtype": shape.dtype}
        ref = weakref.ref(shape, lambda _: self.recipes.pop(key, None))
        self.recipes[key] = _Recipe(ref, lambda: func(*args, **options))
        return shape

    def _ask(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], postponed: list[torch.Tensor]) -> Any:
        first = postponed[0]
        if len(postponed) == 1 and args and args[0] is first:
            if func in _SHAPE_QUESTIONS:
                return func(*args, **kwargs)
            if func in _FILLS and not any(True for _ in _tensors_in((args[1:], kwargs))):
                rest = args[1:]
                self.recipes[id(first)].fills.append(lambda tensor: func(tensor, *rest, **kwargs))
                return first
        for tensor in postponed:
            self._make(tensor)
        return func(*args, **kwargs)

    def _make(self, tensor: torch.Tensor) -> None:
        """Give a postponed tensor its memory and values, in the same object."""
        recipe = self.recipes.pop(id(tensor), None)
        if recipe is None:
            return
        self.is_making = True
        try:
            made = recipe.make()
            del recipe  # and with it the weak reference, which an object that is swapped must not have
            torch.utils.swap_tensors(tensor, made)  # type: ignore[no-untyped-call]  # torch has not annotated it
        finally:
            self.is_making = False


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)
