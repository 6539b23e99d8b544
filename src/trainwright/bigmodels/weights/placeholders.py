"""Meta tensors that replace offloaded weights in a model. Each one has a `ReplacedWeight`: where its weight is.

A placeholder has the dtype and `requires_grad` of the weight that replaces it in a forward. While a hook offloads the
weight, the placeholder raises an error if it is used in a computation. A module may use a weight of another module
without calling it, such as a head that multiplies by an embedding's weight. The weight is then a meta tensor, because
hooks load it only while its own module is called. torch's CPU kernels accept a meta tensor among their arguments
without an error, and return uninitialized memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from trainwright.bigmodels.weights.stored_weights import FileSpan, StoredWeights, copy_stored
from trainwright.core.errors import ConfigurationError

_META = torch.device("meta")
_REPLACED = "_replaced_weight"
_data: Any = torch.Tensor.data
# Functions that use only the shape, dtype or device of a meta argument, and those that copy or build state dicts use.
_ALLOWED = frozenset(
    {"copy_", "to", "type_as", "expand_as", "view_as", "reshape_as", "result_type", "is_same_size", "__set__", "detach"}
)
# Conversions of a model, which replace its buffers by the result.
_CONVERSIONS = frozenset({"to", "half", "float", "double", "bfloat16", "type"})


@dataclass(slots=True, eq=False)
class ReplacedWeight:
    """The weight that a placeholder replaces: where it is, and the tensor to which it returns.

    Attributes:
        device: The device of the tensor that the placeholder replaced. Meta if this tensor had no values.
        original: This tensor if it still exists. Its memory is freed while the weight is offloaded.
        value: The values, if they are only in a file. Values in memory are in the weights map of a hook.
        span: The location of `value` in the file.
        label: The name of the weight in errors. None: neither a hook nor a file has its value, and there are no errors.
        is_hooked: True if a hook loads the weight for a forward.
    """

    device: torch.device = _META
    original: Callable[[], torch.Tensor | None] = lambda: None
    value: torch.Tensor | None = None
    span: FileSpan | None = None
    label: str | None = None
    is_hooked: bool = False

    def keep(self, original: torch.Tensor) -> None:
        """Record the tensor to which the weight returns, without keeping it in memory."""
        self.original = TensorWeakRef(original)

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplacedWeight:
        """Copy the record of a weight. The copied weight returns to a new tensor."""
        twin = memo[id(self)] = ReplacedWeight(self.device, label=self.label, is_hooked=self.is_hooked)
        if self.value is not None:
            twin.value, twin.span = copy_stored(self.value, self.span, memo)
        return twin


def _call_checked(
    function: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Call a torch function on placeholders. The results are placeholders. Raise if another argument has values."""
    kwargs = kwargs or {}
    name = getattr(function, "__name__", "")
    with torch._C.DisableTorchFunctionSubclass():
        used = _labelled([*args, *kwargs.values()])
        if used is not None and name not in _ALLOWED and any(_has_values(value) for value in (*args, *kwargs.values())):
            raise ConfigurationError(_message(used, name))
        try:
            found = function(*args, **kwargs)
        except NotImplementedError as error:  # the function reads values, such as a copy to a device
            if used is None:
                raise
            raise ConfigurationError(_message(used, name)) from error
        if function == _data.__get__ or (name == "detach" and isinstance(args[0], OffloadedParameter)):
            return found  # ordinary tensors, for state dicts and new parameters
        replaced = None if used is None else ReplacedWeight(label=used.label, is_hooked=used.is_hooked)
        if name in _CONVERSIONS and (own := replaced_weight(args[0])) is not None:
            replaced = own  # a converted buffer has the same weight
        if isinstance(found, (tuple, list)) and type(found) in (tuple, list):
            return type(found)(_marked(each, replaced) for each in found)
        return _marked(found, replaced)


def _copy(tensor: OffloadedParameter | OffloadedTensor, memo: dict[int, Any]) -> Any:
    """Copy a placeholder with its `ReplacedWeight`. torch's implementation would return an ordinary tensor."""
    if id(tensor) not in memo:
        with torch._C.DisableTorchFunctionSubclass():
            memo[id(tensor)] = _new(tensor, tensor.as_subclass(torch.Tensor).detach().clone())
        set_replaced_weight(memo[id(tensor)], copy.deepcopy(replaced_weight(tensor), memo) or ReplacedWeight())
    return memo[id(tensor)]


class OffloadedParameter(nn.Parameter):
    """A meta tensor that replaces an offloaded parameter."""

    __torch_function__ = staticmethod(_call_checked)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _copy(self, memo)

    def __reduce_ex__(self, protocol: object) -> Any:
        """Pickle as an ordinary parameter on the meta device."""
        with torch._C.DisableTorchFunctionSubclass():
            plain: Any = nn.Parameter(self.as_subclass(torch.Tensor).detach(), self.requires_grad)
            return plain.__reduce_ex__(protocol)


class OffloadedTensor(torch.Tensor):
    """A meta tensor that replaces an offloaded buffer, or a result of a function of offloaded weights."""

    __torch_function__ = staticmethod(_call_checked)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _copy(self, memo)

    def __reduce_ex__(self, protocol: object) -> Any:
        """Pickle as an ordinary meta tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            plain: Any = self.as_subclass(torch.Tensor)
            return plain.__reduce_ex__(protocol)


class Placeholders:
    """The placeholders of one model. Modules that share a tensor share its placeholder."""

    def __init__(self) -> None:
        self._of: MutableMapping[torch.Tensor, torch.Tensor] = WeakTensorKeyDictionary()

    def replace(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the placeholder that replaces a tensor: the tensor itself if it is one."""
        if replaced_weight(tensor) is not None:
            return tensor
        found = self._of.get(tensor)
        if found is None:
            found = self._of[tensor] = _placeholder_of(tensor)
        return found


def placeholder(tensor: torch.Tensor, replaced: ReplacedWeight, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a new placeholder for the weight `replaced`. It is like a parameter or buffer."""
    with without_guard():
        if tensor.is_meta and dtype in (None, tensor.dtype):
            value = tensor.detach()  # empty_like of a meta tensor runs 20 × as long, in Python
        else:
            value = torch.empty_like(tensor, dtype=dtype, device=_META)
        new = _new(tensor, value)
    set_replaced_weight(new, replaced)
    return new


def _placeholder_of(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_meta:
        replaced = ReplacedWeight(tensor.device)
        replaced.keep(tensor)
        return placeholder(tensor, replaced)
    if type(tensor) in (nn.Parameter, torch.Tensor):
        return placeholder(tensor, ReplacedWeight(original=lambda: tensor))  # has no memory to free
    set_replaced_weight(tensor, ReplacedWeight())  # of an unknown class, which may have no other constructor
    return tensor


def _new(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return `value` as a placeholder for `tensor`. Other subclasses of tensors have placeholders without checks."""
    if type(tensor) in (torch.Tensor, OffloadedTensor):
        return value.as_subclass(OffloadedTensor)
    if type(tensor) not in (nn.Parameter, OffloadedParameter):
        return like(tensor, value)
    with torch.inference_mode(value.is_inference()):  # inference tensors can become parameters only in this mode
        return OffloadedParameter(value, requires_grad=tensor.requires_grad)


def replaced_weight(tensor: torch.Tensor) -> ReplacedWeight | None:
    """Return the weight that a placeholder replaces. None for other tensors."""
    found: ReplacedWeight | None = tensor.__dict__.get(_REPLACED)
    return found


def set_replaced_weight(tensor: torch.Tensor, replaced: ReplacedWeight) -> None:
    """Make a tensor the placeholder of a weight."""
    tensor.__dict__[_REPLACED] = replaced


def in_files(model: nn.Module) -> StoredWeights:
    """Return the weights that a model has only in files, by their names in the model."""
    found = StoredWeights()
    for tensors in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in tensors:
            replaced = replaced_weight(tensor)
            if replaced is not None and replaced.value is not None:
                found.add(name, replaced.value, replaced.span)
    return found


def partly_offloaded(model: nn.Module) -> dict[int, torch.Tensor]:
    """Return the id of a placeholder → the parameter that it replaces in some modules, and that others have."""
    parameters = list(model.parameters())
    present = {id(parameter) for parameter in parameters}
    found: dict[int, torch.Tensor] = {}
    for parameter in parameters:
        replaced = replaced_weight(parameter)
        original = None if replaced is None else replaced.original()
        if original is not None and not original.is_meta and id(original) in present:
            found[id(parameter)] = original
    return found


def without_guard() -> Any:
    """Return a context without the checks of placeholders, in which reading their attributes is fast."""
    return torch._C.DisableTorchFunctionSubclass()


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
    attributes = {name: each for name, each in tensor.__dict__.items() if name != _REPLACED}
    return type(tensor)(value, requires_grad=tensor.requires_grad, **attributes)


def _has_values(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_values, value))
    return isinstance(value, torch.Tensor) and not value.is_meta and value.dim() > 0


def _marked(value: object, replaced: ReplacedWeight | None) -> Any:
    if replaced is not None and type(value) is torch.Tensor and value.is_meta:
        value = value.as_subclass(OffloadedTensor)
        set_replaced_weight(value, replaced)
    return value


def _labelled(values: Iterable[Any]) -> ReplacedWeight | None:
    """Return the weight of the first placeholder whose weight has a label."""
    for value in values:
        found: ReplacedWeight | None
        if isinstance(value, (list, tuple)):
            found = _labelled(value)
        else:
            found = getattr(value, "__dict__", {}).get(_REPLACED)
        if found is not None and found.label is not None:
            return found
    return None


def _message(replaced: ReplacedWeight, function: str) -> str:
    if not replaced.is_hooked:
        return (
            f"{replaced.label} is in a file, and {function} was called with its placeholder: no hook loads the weight. "
            "Call dispatch_model(model, device_map) before the model is used."
        )
    return (
        f"{replaced.label} is offloaded, and {function} was called with its placeholder: a module uses the weight "
        "without calling the module that it belongs to. Add the class of the module that uses it to "
        "preload_module_classes, or do not offload this weight (device_map)."
    )
