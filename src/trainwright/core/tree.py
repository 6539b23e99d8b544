"""Batches as trees: find, move and change the tensors inside nested lists, tuples, mappings and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
import math
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard, TypeVar

import torch

from trainwright.core.errors import ConfigurationError
from trainwright.core.host.device_types import properties

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

ModuleT = TypeVar("ModuleT", bound=torch.nn.Module)

Batch: TypeAlias = Any
"""Batch of a user's loader: any tree, that is, nested containers with tensors and other objects as leaves."""


def map_tensors(fn: Callable[[torch.Tensor], Any], tree: object) -> Any:
    """Return `tree` with `fn` applied to every tensor. Containers keep their types. Other leaves are unchanged.

    Containers are lists, tuples, named tuples, dicts and other mutable mappings, and dataclasses. Other objects are
    leaves, including objects with a `to` method, such as a PackedSequence or a BatchEncoding of transformers. `move`
    moves these.
    """
    return _map(fn, tree, None)


def _map(fn: Callable[[torch.Tensor], Any], tree: Any, movable: Callable[[Any], Any] | None) -> Any:
    """Apply `fn` to tensors and, if passed, `movable` to other objects that have a `to` method."""
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    # Plain containers first and without `rebuild`, because this function runs in every step.
    kind = type(tree)
    if kind is dict:
        return {key: _map(fn, value, movable) for key, value in tree.items()}
    if kind is list or kind is tuple:
        return kind([_map(fn, value, movable) for value in tree])
    # Before named tuples: a PackedSequence is one, but its parts must not be changed separately.
    if callable(getattr(tree, "to", None)):
        return tree if movable is None else movable(tree)
    return rebuild(tree, lambda part: _map(fn, part, movable))


def is_container(tree: object) -> bool:
    """Return whether `rebuild` traverses an object: a list, tuple, mapping or instance of a dataclass."""
    return isinstance(tree, (list, tuple, Mapping)) or (dataclasses.is_dataclass(tree) and not isinstance(tree, type))


def rebuild(tree: Any, visit: Callable[[Any], Any], *, skip_keys: Collection[Any] = ()) -> Any:
    """Return a container with `visit` applied to its items. Other objects are returned unchanged.

    Args:
        tree: the container. It is not changed. A mapping or dataclass is copied by `copy.copy`.
        visit: called with each item of a list or tuple, value of a mapping, or field of a dataclass.
        skip_keys: keys of a mapping whose values are not changed.
    """
    kind = type(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return kind(*(visit(value) for value in tree))
    if isinstance(tree, (list, tuple)):
        return kind(visit(value) for value in tree)
    changed: Any
    if isinstance(tree, Mapping):
        changed = copy.copy(tree)
        for key, value in tree.items():
            if key not in skip_keys:
                changed[key] = visit(value)
        return changed
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        changed = copy.copy(tree)
        for field in dataclasses.fields(tree):
            object.__setattr__(changed, field.name, visit(getattr(tree, field.name)))
        return changed
    return tree


def copy_containers(tree: Any) -> Any:
    """Return `tree` with new containers and the same leaves. Changes to the new containers do not affect `tree`."""
    if isinstance(tree, tuple) and callable(getattr(tree, "to", None)):  # a PackedSequence
        return tree
    return rebuild(tree, copy_containers)


@contextmanager
def restore_attributes(owner: object, skip: Collection[str]) -> Iterator[None]:
    """Restore an object's own attributes after the context.

    Attributes get their earlier values, and new attributes are deleted. Within the context, tensors, lists, dicts, sets
    and deques are copies. Changes in place are therefore undone, too. Changes in place of other objects remain.

    Args:
        owner: the object.
        skip: names of attributes that are neither copied nor restored.
    """
    attributes = vars(owner)
    originals = {name: value for name, value in attributes.items() if name not in skip}
    # The copies are changed and the originals are restored, so that other references to the originals stay valid.
    for name, value in originals.items():
        if isinstance(value, (list, dict, torch.Tensor)):
            attributes[name] = map_tensors(torch.clone, value)
        elif isinstance(value, (set, deque)):
            attributes[name] = copy.copy(value)
    try:
        yield
    finally:
        for name in attributes.keys() - skip:
            del attributes[name]
        attributes.update(originals)


def iterate_tensors(tree: object) -> Iterator[torch.Tensor]:
    """Yield every tensor of `tree`, depth first, also those of containers with a `to` method, unlike `map_tensors`."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from iterate_tensors(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from iterate_tensors(value)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from iterate_tensors(getattr(tree, field.name))


def named_leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of `tree` with their paths, depth first, in the order in which `rebuild` visits them.

    For example, `{"loss": [1, 2]}` yields `("['loss'][0]", 1)` and `("['loss'][1]", 2)`. A key that is neither text nor
    an integer is `[…]` in the path.
    """
    parts: list[tuple[str, Any]] = []
    if isinstance(tree, Mapping):
        parts = [(f"[{key!r}]" if isinstance(key, (str, int)) else "[…]", value) for key, value in tree.items()]
    elif isinstance(tree, (list, tuple)):
        fields = getattr(tree, "_fields", None)
        names = [f".{field}" for field in fields] if fields else [f"[{index}]" for index in range(len(tree))]
        parts = list(zip(names, tree, strict=True))
    elif is_container(tree):
        parts = [(f".{field.name}", getattr(tree, field.name)) for field in dataclasses.fields(tree)]
    else:
        yield name, tree
    for part, value in parts:
        yield from named_leaves(value, name + part)


def move_module(module: ModuleT, device: torch.device) -> ModuleT:
    """Move a module to a device and return it.

    Parameters remain the same objects, because optimizers and tied layers reference them. In torch 2.13, `nn.Module.to`
    replaces parameters on devices that a package adds to torch.
    """
    future = torch.__future__
    kinds = {device.type, *(parameter.device.type for parameter in module.parameters())}
    is_added = any(properties(kind).module is not None for kind in kinds)
    previous = future.get_swap_module_params_on_conversion()
    # True makes `to` swap the contents of the old and the new parameter, so that the old object is kept.
    future.set_swap_module_params_on_conversion(previous or is_added)
    try:
        return module.to(device)
    finally:
        future.set_swap_module_params_on_conversion(previous)


def move(tree: object, device: torch.device, *, float_dtype: torch.dtype | None = None) -> Any:
    """Return `tree` with its tensors on `device`. Copies from pinned memory are asynchronous.

    Copies to devices without `DeviceType.copies_beside`, such as the host and MPS, are synchronous: the result may be
    read, and the source changed, immediately.

    Args:
        tree: a batch. Objects in the batch with a method `to(device)` are moved, too.
        device: the target.
        float_dtype: dtype for floating-point tensors. Default: None, which changes no dtype.

    Raises:
        ConfigurationError: the batch is nested more deeply than Python's recursion limit, or contains itself.
    """
    non_blocking = properties(device.type).copies_beside

    def move_tensor(tensor: torch.Tensor) -> torch.Tensor:
        if float_dtype is not None and tensor.is_floating_point():
            return tensor.to(device=device, dtype=float_dtype, non_blocking=non_blocking)
        return tensor.to(device=device, non_blocking=non_blocking)

    try:
        return _map(move_tensor, tree, lambda movable: movable.to(device))
    except RecursionError as error:
        raise too_deep("a batch") from error


def too_deep(what: str) -> ConfigurationError:
    """Return the error for modules or containers that are nested more deeply than Python's recursion limit."""
    return ConfigurationError(
        f"{what} is nested more deeply than Python's recursion limit allows ({sys.getrecursionlimit()} calls). Nest it "
        "less deeply, or increase the limit by sys.setrecursionlimit."
    )


def is_sharded(value: object) -> TypeGuard[DTensor]:
    """Return whether a value is a sharded tensor (a DTensor). Does not import DTensor, which takes a second."""
    dtensors = sys.modules.get("torch.distributed.tensor")  # imported if a DTensor exists
    return dtensors is not None and isinstance(value, dtensors.DTensor)


def own_class(module: torch.nn.Module) -> type[torch.nn.Module]:
    """Return a module's class, also if FSDP2 has replaced it while the module is sharded."""
    cls = type(module)
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and fsdp.FSDPModule in cls.__bases__:
        # torch sets the class of a sharded Linear to FSDPLinear, whose bases are (FSDPModule, Linear).
        original: type[torch.nn.Module] = cls.__bases__[-1]
        return original
    return cls


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, without a copy. Other tensors are returned unchanged."""
    shard: torch.Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return shard


def full_numel(parameter: torch.Tensor) -> int:
    """Return the number of elements of a full parameter, also if DeepSpeed has replaced it by an empty tensor with the
    original shape in `ds_shape`.
    """
    shape = getattr(parameter, "ds_shape", parameter.shape)
    return math.prod(shape)


def batch_size(batch: Batch) -> int:
    """Return the number of samples in `batch`: the leading length of the first tensor with a dimension, else 1.

    A list of strings has one sample per entry. Only shapes are read, never values.
    """
    # The usual batch, `(inputs, targets)`: a fast path without generators, because this runs in every step.
    kind = type(batch)
    if kind is tuple or kind is list:
        first = batch[0] if batch else None
        if isinstance(first, torch.Tensor) and first.dim() > 0:
            return first.size(0)
    for tensor in iterate_tensors(batch):
        if tensor.dim() > 0:
            return int(tensor.shape[0])
    if isinstance(batch, (list, tuple)) and batch and all(isinstance(item, str) for item in batch):
        return len(batch)
    return 1
