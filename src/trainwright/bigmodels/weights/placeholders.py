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
_REPLACED = "_replaced_weight"  # attribute of a placeholder with its `ReplacedWeight`
_data: Any = torch.Tensor.data  # the property. mypy takes it for a tensor.
# Functions that use only the shape, dtype or device of a meta argument, and those that copy or build state dicts use.
_ALLOWED = frozenset(
    {"copy_", "to", "type_as", "expand_as", "view_as", "reshape_as", "result_type", "is_same_size", "__set__", "detach"}
)
# Conversions of a model, which replace its buffers by the result.
_CONVERSIONS = frozenset({"to", "half", "float", "double", "bfloat16", "type"})


@dataclass(slots=True, eq=False)
class ReplacedWeight:
    """The weight that a placeholder replaces: the place of its values, and the tensor to which they return.

    For example, a CPU weight that a hook offloads has `device="cpu"`, `is_hooked=True` and a label. A weight that was
    loaded from a checkpoint to the disk, before a hook is added, has `device="meta"`, `value`, `span` and a label.

    Attributes:
        device: The device of the tensor that the placeholder replaced. Meta if this tensor had no values.
        original: Returns this tensor, or None if it no longer exists. A placeholder does not keep it alive, unless it
            is a meta tensor.
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
        """Record the tensor to which the weight returns, by a weak reference."""
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
    """Call a torch function on placeholders. The results are placeholders. Raise if another argument has values.

    This is the `__torch_function__` of the classes below. Only placeholders with a label raise errors.
    """
    kwargs = kwargs or {}
    name = getattr(function, "__name__", "")
    with torch._C.DisableTorchFunctionSubclass():
        arguments = [*args, *kwargs.values()]
        labelled = _labelled(arguments)
        if labelled is not None and name not in _ALLOWED and any(map(_has_values, arguments)):
            raise ConfigurationError(_message(labelled, name))
        try:
            result = function(*args, **kwargs)
        except NotImplementedError as error:  # the function reads values, such as a copy to a device
            if labelled is None:
                raise
            raise ConfigurationError(_message(labelled, name)) from error
        if function == _data.__get__ or (name == "detach" and isinstance(args[0], OffloadedParameter)):
            return result  # ordinary tensors, for state dicts and new parameters
        # Results raise the same errors as the placeholder, so that a computation of several steps raises one, too.
        replaced = None if labelled is None else ReplacedWeight(label=labelled.label, is_hooked=labelled.is_hooked)
        if name in _CONVERSIONS:
            converted = replaced_weight(args[0])
            if converted is not None:
                replaced = converted  # a converted buffer has the same weight
        if type(result) in (tuple, list):  # not named tuples, whose classes have another constructor
            return type(result)(_marked(each, replaced) for each in result)
        return _marked(result, replaced)


def _copy(tensor: OffloadedParameter | OffloadedTensor, memo: dict[int, Any]) -> Any:
    """Copy a placeholder with its `ReplacedWeight`. torch's implementation would return an ordinary tensor."""
    if id(tensor) not in memo:
        with torch._C.DisableTorchFunctionSubclass():
            twin = _new(tensor, tensor.as_subclass(torch.Tensor).detach().clone())
        memo[id(tensor)] = twin
        set_replaced_weight(twin, copy.deepcopy(replaced_weight(tensor), memo) or ReplacedWeight())
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
        # Tensor → its placeholder, while the tensor exists.
        self._of: MutableMapping[torch.Tensor, torch.Tensor] = WeakTensorKeyDictionary()

    def replace(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the placeholder that replaces a tensor: the tensor itself if it is one."""
        if replaced_weight(tensor) is not None:
            return tensor
        known = self._of.get(tensor)
        if known is not None:
            return known
        new = _placeholder_of(tensor)
        self._of[tensor] = new
        return new


def placeholder(tensor: torch.Tensor, replaced: ReplacedWeight, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a new placeholder for the weight `replaced`. It is a parameter or buffer like `tensor`.

    `dtype` is the dtype of the placeholder. Default: that of `tensor`.
    """
    with without_guard():
        if tensor.is_meta and dtype in (None, tensor.dtype):
            value = tensor.detach()  # empty_like of a meta tensor runs 20 × as long, in Python
        else:
            value = torch.empty_like(tensor, dtype=dtype, device=_META)
        new = _new(tensor, value)
    set_replaced_weight(new, replaced)
    return new


def _placeholder_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a placeholder for a tensor of a module. A meta tensor of an unknown class becomes its own placeholder."""
    if not tensor.is_meta:
        replaced = ReplacedWeight(tensor.device)
        replaced.keep(tensor)
        return placeholder(tensor, replaced)
    if type(tensor) in (nn.Parameter, torch.Tensor):
        return placeholder(tensor, ReplacedWeight(original=lambda: tensor))  # has no memory to free
    set_replaced_weight(tensor, ReplacedWeight())  # of an unknown class, which may have no other constructor
    return tensor


def _new(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return the meta tensor `value` as a placeholder for `tensor`, without its `ReplacedWeight`.

    Placeholders of other classes than `nn.Parameter` and `torch.Tensor` keep the class, and have no checks.
    """
    if type(tensor) in (torch.Tensor, OffloadedTensor):
        return value.as_subclass(OffloadedTensor)
    if type(tensor) not in (nn.Parameter, OffloadedParameter):
        return like(tensor, value)
    with torch.inference_mode(value.is_inference()):  # inference tensors can become parameters only in this mode
        return OffloadedParameter(value, requires_grad=tensor.requires_grad)


def replaced_weight(tensor: torch.Tensor) -> ReplacedWeight | None:
    """Return the weight that a placeholder replaces. None for other tensors."""
    replaced: ReplacedWeight | None = tensor.__dict__.get(_REPLACED)
    return replaced


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
    """Return the placeholders of parameters that other modules have in memory: id of the placeholder → parameter.

    For example, a head on the disk has a placeholder for the weight of an embedding on the CPU.
    """
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
    """Return a context without the checks of placeholders. Reading attributes such as `device` is faster in it."""
    return torch._C.DisableTorchFunctionSubclass()


def like(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Convert `value` to a parameter with the class and attributes of `tensor`. Return it unchanged for a buffer.

    The parameter shares the memory of `value`, and has the `requires_grad` of `tensor`.
    """
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
    """Return whether an argument is or contains a tensor with values. False for 0-dim tensors, which act as numbers."""
    if isinstance(value, (list, tuple)):
        return any(map(_has_values, value))
    return isinstance(value, torch.Tensor) and not value.is_meta and value.dim() > 0


def _marked(value: object, replaced: ReplacedWeight | None) -> Any:
    """Return a result as a placeholder if it is a meta tensor. Return other results unchanged."""
    if replaced is not None and type(value) is torch.Tensor and value.is_meta:
        value = value.as_subclass(OffloadedTensor)
        set_replaced_weight(value, replaced)
    return value


def _labelled(values: Iterable[Any]) -> ReplacedWeight | None:
    """Return the weight of the first placeholder whose weight has a label."""
    for value in values:
        replaced: ReplacedWeight | None
        if isinstance(value, (list, tuple)):  # such as the tensors of torch.cat
            replaced = _labelled(value)
        else:
            replaced = getattr(value, "__dict__", {}).get(_REPLACED)
        if replaced is not None and replaced.label is not None:
            return replaced
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
