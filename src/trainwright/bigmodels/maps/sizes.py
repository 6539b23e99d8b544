"""Sizes of a model's parts in a given dtype, and shared tensors. Models may be on the meta device."""

from __future__ import annotations

import enum
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from trainwright.bigmodels.maps.device_assignment import Outline
from trainwright.core.errors import ConfigurationError, nearest


class CustomDtype(enum.Enum):
    """Dtypes of weights for which torch has no dtype, or a dtype without an element size."""

    FP8 = "fp8"
    INT8 = "int8"
    INT4 = "int4"
    FP4 = "fp4"
    NF4 = "nf4"
    INT2 = "int2"


DType = torch.dtype | str | CustomDtype

NUMBERED_BLOCK = re.compile(r"(?:.*?\.)?\d+(?=\.)")
"""Matches `model.layers.0` of `model.layers.0.mlp.weight`."""

_SHORT = {
    "fp32": "float32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp64": "float64",
    "float8": "float8_e4m3fn",
    "fp8": "float8_e4m3fn",
}
_SUB_BYTE = {"int4": 0.5, "uint4": 0.5, "fp4": 0.5, "nf4": 0.5, "int2": 0.25, "uint2": 0.25, "int1": 0.125}

_WITHOUT_SIZE = {f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}  # torch stores a byte per element


def dtype_byte_size(dtype: DType) -> float:
    """Return the bytes of one element: 4 for `torch.float32` or `"float32"`, 0.5 for `"int4"`.

    Args:
        dtype: A torch dtype, its name (`"bfloat16"`, `"bf16"`, `"int8"`, `"float8"`), or a `CustomDtype`.

    Raises:
        ConfigurationError: The dtype is unknown.
    """
    if isinstance(dtype, torch.dtype):
        return _SUB_BYTE.get(str(dtype).removeprefix("torch."), float(dtype.itemsize))
    name = str(dtype.value if isinstance(dtype, CustomDtype) else dtype).removeprefix("torch.").lower()
    if name in _SUB_BYTE:
        return _SUB_BYTE[name]
    found = getattr(torch, _SHORT.get(name, name), None)
    if not isinstance(found, torch.dtype) or name in _WITHOUT_SIZE:
        known = ("float32", "bfloat16", "float16", "float8", "int8", "int4", "nf4")
        raise ConfigurationError(f"dtype {dtype!r} is unknown.{nearest(name, known)} Known: {', '.join(known)}, …")
    return float(found.itemsize)


def _measure(dtype: DType | None, special_dtypes: Mapping[str, DType] | None) -> Callable[[str, torch.Tensor], int]:
    """Return a function from a tensor and its name to its bytes. For the arguments, see `compute_module_sizes`."""
    target = None if dtype is None else dtype_byte_size(dtype)
    special = {name: dtype_byte_size(own) for name, own in (special_dtypes or {}).items()}

    def measure(name: str, tensor: torch.Tensor) -> int:
        width = special.get(name)
        if width is None:
            width = float(tensor.element_size())
            if target is not None and target < width and is_floating(tensor):
                width = target
        return math.ceil(tensor.numel() * width)

    return measure


def extract_submodules_state_dict(
    state_dict: Mapping[str, torch.Tensor], submodule_names: Iterable[str]
) -> dict[str, torch.Tensor]:
    """Return the entries of a state dict that belong to some modules, or have one of the names themselves."""
    found = {}
    for name in submodule_names:
        for key, tensor in state_dict.items():
            if key == name or key.startswith(f"{name}."):  # `h.1` does not contain `h.10`
                found[key] = tensor
    return found


def is_floating(tensor: torch.Tensor) -> bool:
    """Return whether a conversion of a model to another dtype converts this tensor. False for counters and masks."""
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def enclosing(name: str) -> list[str]:
    """Return the names of the modules that contain a tensor or module, outermost (`""`) first, and then its name."""
    return ["", *itertools.accumulate(name.split("."), "{}.{}".format)] if name else [""]


def named_module_tensors(
    module: nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a module's parameters and then its buffers by name, each tensor once.

    `remove_non_persistent` skips buffers that are not in the state dict.
    """
    yield from module.named_parameters(recurse=recurse)
    if include_buffers:
        skipped = _non_persistent(module, recurse=recurse) if remove_non_persistent else set()
        yield from ((name, buffer) for name, buffer in module.named_buffers(recurse=recurse) if name not in skipped)


def _non_persistent(module: nn.Module, *, recurse: bool) -> set[str]:
    modules = module.named_modules(remove_duplicate=False) if recurse else [("", module)]
    return {f"{path}.{name}" if path else name for path, found in modules for name in found._non_persistent_buffers_set}


def compute_module_sizes(
    model: nn.Module,
    dtype: DType | None = None,
    special_dtypes: Mapping[str, DType] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Return the bytes of every module, parameter and buffer by dotted name. `""` is the model.

    A tensor counts at its first name. Modules without tensors are not listed, and the dict returns 0 for them.

    Args:
        model: A model on any device, the meta device included.
        dtype: Count floating-point tensors in this dtype if that makes them smaller. See `dtype_byte_size`.
        special_dtypes: Name of a tensor → dtype to count it in.
        buffers_only: Skip parameters.

    Raises:
        ConfigurationError: A dtype is unknown.
    """
    measure = _measure(dtype, special_dtypes)
    sizes: defaultdict[str, int] = defaultdict(int)
    tensors = model.named_buffers() if buffers_only else named_module_tensors(model, recurse=True)
    for name, tensor in tensors:
        size = measure(name, tensor)
        for part in enclosing(name):
            sizes[part] += size
    return sizes


def compute_module_total_buffer_size(
    model: nn.Module, dtype: DType | None = None, special_dtypes: Mapping[str, DType] | None = None
) -> int:
    """Return the bytes of all buffers, as `compute_module_sizes` counts them."""
    return compute_module_sizes(model, dtype=dtype, special_dtypes=special_dtypes, buffers_only=True)[""]


def get_max_layer_size(
    modules: Sequence[tuple[str, nn.Module | torch.Tensor]],
    module_sizes: Mapping[str, int],
    no_split_module_classes: Sequence[str] | str | None,
) -> tuple[int, list[str]]:
    """Return the bytes of the largest layer and the names of all layers of that size, in order.

    A layer is never split over devices: a module without submodules, a module of `no_split_module_classes`, or a tensor
    that belongs directly to another module. `module_sizes` is from `compute_module_sizes`, for the model of `modules`.
    """
    no_split = class_names(no_split_module_classes)
    largest, names = 0, list[str]()
    waiting = list(reversed(modules))
    while waiting:
        name, module = waiting.pop()
        if isinstance(module, nn.Module) and type(module).__name__ not in no_split:
            children = list(module.named_children())
            waiting.extend((f"{name}.{child}", inner) for child, inner in reversed(children))
            if children:
                waiting.extend((f"{name}.{own}", tensor) for own, tensor in module.named_parameters(recurse=False))
                continue
        size = module_sizes.get(name, 0)
        if size > largest:
            largest, names = size, [name]
        elif size == largest:
            names.append(name)
    return largest, names


def class_names(no_split_module_classes: Collection[str] | str | None) -> frozenset[str]:
    """Convert one class name, several or None to a set. Raise ConfigurationError if a name is not a string."""
    given = [no_split_module_classes] if isinstance(no_split_module_classes, str) else no_split_module_classes or ()
    for name in given:
        if not isinstance(name, str):
            raise ConfigurationError(
                f"no_split_module_classes={no_split_module_classes!r}: pass names of classes, such as 'Block'."
            )
    return frozenset(given)


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Return the bytes of a model, and of its largest layer with the names of all layers of that size.

    Modules of the classes in its `_no_split_modules` (an attribute of transformers models) count as one layer.
    """
    sizes = compute_module_sizes(model)
    no_split: Any = getattr(model, "_no_split_modules", None)
    return sizes[""], get_max_layer_size(list(model.named_children()), sizes, list(no_split or ()))


def find_tied_parameters(model: nn.Module, **kwargs: object) -> list[list[str]]:
    """Return the names of shared parameters, sorted: one list per parameter object.

    `kwargs` are part of Accelerate's signature and must be empty.
    """
    if kwargs:
        raise TypeError(f"find_tied_parameters() accepts only a model. Remove {', '.join(map(repr, kwargs))}.")
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return sorted(sorted(group) for group in names.values() if len(group) > 1)


def retie_parameters(model: nn.Module, tied_params: Sequence[Sequence[str]]) -> None:
    """Tie parameters again after loading has replaced some of them.

    For each group of names from `find_tied_parameters`, the first parameter that is not on the meta device (or else the
    first) replaces the others. An unknown name raises AttributeError before any change.
    """
    groups = []
    for names in tied_params:
        split = [name.rpartition(".") for name in names]
        groups.append([(model.get_submodule(path)._parameters, own) for path, _, own in split])
        for name, (parameters, own) in zip(names, groups[-1], strict=True):
            if own not in parameters:
                raise AttributeError(f"{type(model).__name__} has no parameter {name!r}")
    for group in groups:
        tensors = [tensor for parameters, own in group if (tensor := parameters[own]) is not None]
        for parameters, own in group if tensors else ():
            parameters[own] = next((tensor for tensor in tensors if not tensor.is_meta), tensors[0])


def read_outline(
    model: nn.Module,
    *,
    no_split_module_classes: Collection[str] | str | None = None,
    dtype: DType | None = None,
    special_dtypes: Mapping[str, DType] | None = None,
) -> Outline:
    """Return a model's parts with their sizes, in the order of registration. Visits each module once.

    Layers are modules without children, modules of `no_split_module_classes`, and tensors that belong directly to
    another module. A module's own parameters come before its children, its own buffers after them.

    Raises:
        ConfigurationError: A dtype is unknown.
    """
    no_split, measure = class_names(no_split_module_classes), _measure(dtype, special_dtypes)
    names, sizes, ends, layers = list[str](), list[int](), list[int](), list[bool]()
    parts_of: dict[int, set[int]] = {}  # id of a tensor → layers that contain it

    def append(name: str, tensors: Iterable[tuple[str, torch.Tensor]], is_layer: bool = True) -> int:
        index, size = len(names), 0
        for own, tensor in tensors:
            if id(tensor) not in parts_of:
                size += measure(own, tensor)
            parts_of.setdefault(id(tensor), set()).add(index)
        names.append(name)
        sizes.append(size)
        ends.append(index + 1)
        layers.append(is_layer)
        return size

    def read(name: str, module: nn.Module) -> int:
        children = [(own, child) for own, child in module._modules.items() if child is not None]
        if not children or type(module).__name__ in no_split:
            parts = module.named_modules(prefix=name) if children else [(name, module)]
            return append(name, (one for path, part in parts for one in _named(path, part._parameters, part._buffers)))
        index = len(names)
        append(name, (), is_layer=False)
        size = sum(append(own, [(own, found)]) for own, found in _named(name, module._parameters))
        size += sum(read(f"{name}.{own}" if name else own, child) for own, child in children)
        size += sum(append(own, [(own, found)]) for own, found in _named(name, module._buffers))
        sizes[index], ends[index] = size, len(names)
        return size

    read("", model)
    ties = {tuple(sorted(parts)) for parts in parts_of.values() if len(parts) > 1}
    return Outline(names, sizes, ends, layers, sorted(ties))


def _named(path: str, *groups: Mapping[str, torch.Tensor | None]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that belong directly to the module at `path`, under their full names."""
    for group in groups:
        yield from ((f"{path}.{own}" if path else own, found) for own, found in group.items() if found is not None)
