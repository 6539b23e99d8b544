"""How much memory each part of a model takes, in whatever dtype, and which parts share a tensor.

Nothing here touches a weight's values: models on the meta device are measured as any other.
"""

from __future__ import annotations

import enum
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from trainwright.bigmodels.maps.placement import Outline
from trainwright.core.errors import ConfigurationError, nearest


class CustomDtype(enum.Enum):
    """Widths of weights that torch has no dtype for, or none that counts its bytes."""

    FP8 = "fp8"
    INT8 = "int8"
    INT4 = "int4"
    FP4 = "fp4"
    NF4 = "nf4"
    INT2 = "int2"


DType = torch.dtype | str | CustomDtype

_SHORT = {
    "fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp64": "float64",
    "float8": "float8_e4m3fn", "fp8": "float8_e4m3fn",
}  # fmt: skip
_SUB_BYTE = {"int4": 0.5, "uint4": 0.5, "fp4": 0.5, "nf4": 0.5, "int2": 0.25, "uint2": 0.25, "int1": 0.125}

_WITHOUT_SIZE = {f"{sign}int{bits}" for sign in ("", "u") for bits in (1, 2, 3, 4, 5, 6, 7)}  # torch has only the names


def dtype_byte_size(dtype: DType) -> float:
    """Return the bytes of one element: 4 for `torch.float32` or `"float32"`, 0.5 for `"int4"`.

    Args:
        dtype: of torch, by its name (`"bfloat16"`, `"bf16"`, `"int8"`, `"float8"`), or a `CustomDtype`.

    Raises:
        ConfigurationError: no such dtype.
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


class _Measure:
    """The bytes of a tensor, as it is or in another dtype."""

    def __init__(self, dtype: DType | None, special_dtypes: Mapping[str, DType] | None) -> None:
        self._width = None if dtype is None else dtype_byte_size(dtype)
        self._special = {name: dtype_byte_size(special) for name, special in (special_dtypes or {}).items()}

    def __call__(self, name: str, tensor: torch.Tensor) -> int:
        width: float = tensor.element_size()
        if name in self._special:
            width = self._special[name]
        elif self._width is not None and self._width < width and _takes_a_dtype(tensor):
            width = self._width
        return math.ceil(tensor.numel() * width)


def _takes_a_dtype(tensor: torch.Tensor) -> bool:
    """Tell whether loading a model in another dtype changes this tensor: counters and masks stay as they are."""
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def named_module_tensors(
    module: nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a module's parameters and then its buffers by name, each tensor once.

    Args:
        module: whose.
        include_buffers: also yield buffers.
        recurse: also those of the modules in it.
        remove_non_persistent: leave out buffers that `state_dict` leaves out.
    """
    yield from module.named_parameters(recurse=recurse)
    if include_buffers:
        left_out = _non_persistent(module, recurse=recurse) if remove_non_persistent else set()
        yield from ((name, buffer) for name, buffer in module.named_buffers(recurse=recurse) if name not in left_out)


def _non_persistent(module: nn.Module, *, recurse: bool) -> set[str]:
    modules = module.named_modules(remove_duplicate=False) if recurse else [("", module)]
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, found in modules
        for name in found._non_persistent_buffers_set
    }


def compute_module_sizes(
    model: nn.Module,
    dtype: DType | None = None,
    special_dtypes: Mapping[str, DType] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Return the bytes of every module, parameter and buffer by dotted name; `""` is the whole model.

    A tensor with several names counts at its first one. Modules without any tensor are not listed; looking one up gives
    0.

    Args:
        model: on any device, the meta device included.
        dtype: count floating tensors as if they were loaded in it, where that makes them smaller: a torch dtype, its
            name, or one without a torch dtype such as `"int4"`.
        special_dtypes: name of a tensor → its own dtype, whatever it has now.
        buffers_only: leave parameters out.

    Raises:
        ConfigurationError: an unknown dtype.
    """
    measure = _Measure(dtype, special_dtypes)
    sizes: defaultdict[str, int] = defaultdict(int)
    tensors = model.named_buffers() if buffers_only else named_module_tensors(model, recurse=True)
    for name, tensor in tensors:
        size = measure(name, tensor)
        sizes[""] += size
        end = name.find(".")
        while end != -1:
            sizes[name[:end]] += size
            end = name.find(".", end + 1)
        sizes[name] += size
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

    A layer is what lies on one device: a module without modules in it, one of `no_split_module_classes`, or a tensor.

    Args:
        modules: names and modules (or parameters) to look into.
        module_sizes: from `compute_module_sizes`.
        no_split_module_classes: names of classes that are never divided.
    """
    kept_whole = class_names(no_split_module_classes)
    largest, names = 0, list[str]()
    waiting = list(reversed(modules))
    while waiting:
        name, module = waiting.pop()
        if isinstance(module, nn.Module) and type(module).__name__ not in kept_whole:
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
    """Return class names as a set, from one, several or None.

    Raises:
        ConfigurationError: a class, or anything else that is not a name.
    """
    given = [no_split_module_classes] if isinstance(no_split_module_classes, str) else no_split_module_classes or ()
    for name in given:
        if not isinstance(name, str):
            raise ConfigurationError(
                f"no_split_module_classes={no_split_module_classes!r}: write names of classes, such as 'Block'."
            )
    return frozenset(given)


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Return the bytes of a model, and of its largest layer with the names of all layers of that size.

    Classes in the model's `_no_split_modules` (as those of transformers have) count as one layer.
    """
    sizes = compute_module_sizes(model)
    kept_whole: Any = getattr(model, "_no_split_modules", None)
    return sizes[""], get_max_layer_size(list(model.named_children()), sizes, list(kept_whole or ()))


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """Return the names of parameters that are one and the same object, sorted, a list per parameter.

    Args:
        model: on any device.
        kwargs: none is known; accepted for the signature of Accelerate's.

    Raises:
        TypeError: there are any.
    """
    if kwargs:
        raise TypeError(f"find_tied_parameters() takes a model alone, got {', '.join(map(repr, kwargs))} too.")
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return sorted(sorted(group) for group in names.values() if len(group) > 1)


def retie_parameters(model: nn.Module, tied_params: Sequence[Sequence[str]]) -> None:
    """Make parameters one object again, after loading has replaced some of them.

    Args:
        model: changed in place.
        tied_params: names, a sequence per parameter, as `find_tied_parameters` gave them before. All take the first
            one of the group that is not on the meta device, or the first one where all are.

    Raises:
        AttributeError: the model has no such parameter; nothing has been changed then.
    """
    found = [[(*_home(model, name), name) for name in group] for group in tied_params]
    for group in found:
        tensors = [owner._parameters[own] for owner, own, _ in group]
        loaded = [tensor for tensor in tensors if tensor is not None]
        if not loaded:
            continue
        shared = next((tensor for tensor in loaded if not tensor.is_meta), loaded[0])
        for owner, own, _ in group:
            owner._parameters[own] = shared


def _home(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that owns a parameter, and the parameter's name there."""
    path, _, own = name.rpartition(".")
    owner = model.get_submodule(path)
    if own not in owner._parameters:
        raise AttributeError(f"{type(model).__name__} has no parameter {name!r}")
    return owner, own


def read_outline(
    model: nn.Module,
    *,
    no_split_module_classes: Collection[str] | str | None = None,
    dtype: DType | None = None,
    special_dtypes: Mapping[str, DType] | None = None,
) -> Outline:
    """Return a model's parts with their sizes, in the order in which it names them, visiting each module once.

    Whole are modules without modules in them, those of `no_split_module_classes`, and tensors that belong directly to
    a module which may be divided. Such parameters stand before the modules beside them, such buffers after.

    Raises:
        ConfigurationError: an unknown dtype.
    """
    reader = _OutlineReader(class_names(no_split_module_classes), _Measure(dtype, special_dtypes))
    reader.read("", model)
    ties = [sorted(parts) for parts in reader.parts_of.values() if len(parts) > 1]
    return Outline(reader.names, reader.sizes, reader.ends, reader.whole, sorted({tuple(tie) for tie in ties}))


class _OutlineReader:
    def __init__(self, kept_whole: frozenset[str], measure: _Measure) -> None:
        self.kept_whole = kept_whole
        self.measure = measure
        self.names: list[str] = []
        self.sizes: list[int] = []
        self.ends: list[int] = []
        self.whole: list[bool] = []
        self.parts_of: dict[int, set[int]] = {}  # id of a tensor → whole parts that hold it

    def read(self, name: str, module: nn.Module) -> int:
        """Append a module and what it consists of; returns its bytes."""
        children = [(own, child) for own, child in module._modules.items() if child is not None]
        if not children or type(module).__name__ in self.kept_whole:
            index = self._append(name, whole=True)
            prefix = f"{name}." if name else ""
            self._weigh(index, prefix, module) if not children else self._weigh_all(index, prefix, module)
            return self.sizes[index]
        index = self._append(name, whole=False)
        prefix = f"{name}." if name else ""
        size = 0
        for own, tensor in module._parameters.items():
            size += self._read_tensor(prefix + own, tensor)
        for own, child in children:
            size += self.read(prefix + own, child)
        for own, buffer in module._buffers.items():
            size += self._read_tensor(prefix + own, buffer)
        self.sizes[index] = size
        self.ends[index] = len(self.names)
        return size

    def _append(self, name: str, *, whole: bool) -> int:
        index = len(self.names)
        self.names.append(name)
        self.sizes.append(0)
        self.ends.append(index + 1)
        self.whole.append(whole)
        return index

    def _read_tensor(self, name: str, tensor: torch.Tensor | None) -> int:
        if tensor is None:
            return 0
        index = self._append(name, whole=True)
        self._add(index, name, tensor)
        return self.sizes[index]

    def _weigh(self, index: int, prefix: str, module: nn.Module) -> None:
        for own, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                self._add(index, prefix + own, tensor)

    def _weigh_all(self, index: int, prefix: str, module: nn.Module) -> None:
        for path, inner in module.named_modules():
            self._weigh(index, f"{prefix}{path}." if path else prefix, inner)

    def _add(self, index: int, name: str, tensor: torch.Tensor) -> None:
        parts = self.parts_of.get(id(tensor))
        if parts is None:
            self.parts_of[id(tensor)] = {index}
            self.sizes[index] += self.measure(name, tensor)
        else:
            parts.add(index)
