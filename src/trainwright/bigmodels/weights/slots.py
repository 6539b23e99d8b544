"""What stands in a module in the place of a weight that is away, and what is put there while it is used.

What the module shows is the truth: a weight comes with the dtype and `requires_grad` of the tensor that stands in its
place when it is needed, and where somebody has put a tensor with values there, that one is used. Gradients of weights
that are away are dropped as soon as they are there: nothing shows them, and they would take a model's memory.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from trainwright.bigmodels.weights.away import AwayParameter, unguard

# Modules that share a parameter share what stands in its place, and what is put back in the end. Entries go with
# their keys: with the parameter when nobody has it any more, with the placeholder when it is no longer used.
_PLACEHOLDERS: MutableMapping[torch.Tensor, torch.Tensor] = WeakTensorKeyDictionary()
_RESTORED: MutableMapping[torch.Tensor, torch.Tensor] = WeakTensorKeyDictionary()

_META = torch.device("meta")


@dataclass(slots=True)
class Slot:
    """A parameter or buffer whose value is away between two forwards.

    Attributes:
        name: within the hook's module: `path`, a dot, and `leaf`; the path is empty for the module's own.
        placeholder: what was put in its place, on the meta device.
        device: where it was before.
        former: what stood there before, kept where its memory is what the weights map hands out anyway.
        original: what stood there before, where it is not kept: an optimizer may hold it still.
        is_shared: a module that is not offloaded has `former` too. Then gradients are its own, and are not dropped.
        kept: what is put in its place, where that is a view of a file or of host memory and can be used again.
    """

    name: str
    path: str
    leaf: str
    is_buffer: bool
    placeholder: torch.Tensor
    device: torch.device
    former: torch.Tensor | None = None
    original: TensorWeakRef | None = None
    is_shared: bool = False
    kept: torch.Tensor | None = None

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, is_buffer: bool, value: torch.Tensor) -> Slot:
        """Return the slot of a module's present `tensor`, whose value the weights map gives as `value`."""
        path, _, leaf = name.rpartition(".")
        if tensor.is_meta:
            return cls(name, path, leaf, is_buffer, tensor, tensor.device)
        slot = cls(name, path, leaf, is_buffer, _placeholder_of(tensor), tensor.device)
        if tensor.device == value.device and tensor.data_ptr() == value.data_ptr():
            slot.former = tensor
        else:
            slot.original = TensorWeakRef(tensor)
        return slot

    def __deepcopy__(self, memo: dict[int, Any]) -> Slot:
        placeholder, former = copy.deepcopy((self.placeholder, self.former), memo)
        # Kept anew, not read into memory; and nobody holds a copy of what the module had before.
        return replace(self, placeholder=placeholder, former=former, original=None, kept=None)

    def table(self, module: nn.Module) -> dict[str, Any]:
        """Return the table of the hook's module, or of one within, that the tensor stands in."""
        owner = module.get_submodule(self.path) if self.path else module
        return owner._buffers if self.is_buffer else owner._parameters

    def replaced(self, module: nn.Module, value: torch.Tensor, span: Any) -> Slot:
        """Return the slot for another value, whose placeholder stands in the module; `span` says where it lies in a
        file, and is None for one in memory, which is put back into memory in the end.
        """
        former = self.original if self.former is None else TensorWeakRef(self.former)
        shown = self.table(module)[self.leaf]
        new = replace(self, placeholder=shown, former=None, original=former, is_shared=False, kept=None)
        return new if span is not None else replace(new, device=value.device)

    def weight(self, shown: torch.Tensor, value: torch.Tensor, *, records: bool, by_hand: bool) -> torch.Tensor:
        """Return what is put in the place of `shown`; called outside of inference mode, where nothing is recorded.

        Args:
            shown: what stands there, on the meta device.
            value: on the device where it is used.
            records: the use may be recorded for a backward.
            by_hand: not for a forward, but for a user who may look at the gradient.
        """
        former = self.former
        if (
            former is not None
            and former.device == value.device
            and former.dtype == shown.dtype
            and former.requires_grad == shown.requires_grad
            and (self.is_shared or not former.requires_grad)
        ):
            return former
        weight = like(shown, value.to(shown.dtype))
        if records and not by_hand and weight.requires_grad and weight.is_leaf and not weight.is_inference():
            weight.register_post_accumulate_grad_hook(_drop_gradient)  # type: ignore[no-untyped-call]  # torch's
        return weight

    def kept_as(self, shown: torch.Tensor) -> torch.Tensor | None:
        """Return what is kept, if it is as the module shows it now."""
        kept = self.kept
        fits = kept is not None and kept.dtype == shown.dtype and kept.requires_grad == shown.requires_grad
        return kept if fits else None

    def keep(self, weight: torch.Tensor, is_lasting: bool) -> None:
        """Keep what `weight` returned for the next forward, if its memory costs nothing and it will be the same."""
        self.kept = weight if is_lasting and (weight is self.former or not self.is_shared) else None

    def taken_back(self, shown: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
        """Return what stood in the module before, as it shows it now, or its like. Its memory is that of `stored`,
        unless the dtype differs.
        """
        original = None if self.original is None else self.original()
        restored: torch.Tensor | None = self.former if self.former is not None else original
        if restored is None:
            return like(shown, stored.detach().to(shown.dtype))
        _follow(restored, shown)
        if restored is not self.former:
            restored.data = stored.to(shown.dtype)
        return restored

    def put_back(self, module: nn.Module, stored: torch.Tensor) -> None:
        """Put back what stood in the module before, with the values `stored`, as what the module shows now. Tensors
        that were on the meta device stay there, and values that somebody has put there stay too.
        """
        table = self.table(module)
        shown = table.get(self.leaf)
        if shown is None or not shown.is_meta:
            return
        if self.former is None and self.device == _META:
            unguard(shown)
            return
        original = None if self.original is None else self.original()
        restored = self.former if self.former is not None else _RESTORED.get(shown)
        if restored is None and original is not None:
            _follow(original, shown)
            original.data.copy_(stored)
            restored = original
        elif restored is None:
            restored = _RESTORED[shown] = like(shown, _copied_as(shown, stored, self.device))
        _follow(restored, shown)
        table[self.leaf] = restored


def _drop_gradient(weight: torch.Tensor) -> None:
    weight.grad = None


def _copied_as(shown: torch.Tensor, stored: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy in the dtype, and the memory format, of what stands in the module: files have none."""
    value = stored.to(device, shown.dtype, copy=True)
    if value.layout is torch.strided and value.stride() != shown.stride() and value.shape == shown.shape:
        value = torch.empty_strided(shown.shape, shown.stride(), dtype=value.dtype, device=device).copy_(value)
    return value


def _placeholder_of(tensor: torch.Tensor) -> torch.Tensor:
    found = _PLACEHOLDERS.get(tensor)
    if found is None or found.shape != tensor.shape:
        found = _PLACEHOLDERS[tensor] = like(tensor, torch.empty_like(tensor, device=_META))
    _follow(found, tensor)  # it may be of a former time
    return found


def _follow(tensor: torch.Tensor, shown: torch.Tensor) -> None:
    """Give a tensor the dtype and `requires_grad` of another; it keeps its identity."""
    if tensor.dtype != shown.dtype:
        if tensor.grad is not None:
            tensor.grad = None if not shown.is_floating_point() else tensor.grad.to(shown.dtype)
        tensor.data = tensor.data.to(shown.dtype)
    if isinstance(shown, nn.Parameter) and tensor.requires_grad != shown.requires_grad:
        tensor.requires_grad_(shown.requires_grad)


def like(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return `value` as what `tensor` is: a parameter of its class and attributes, or a plain buffer.

    Values that were loaded in inference mode are of it for good, and become parameters there alone.
    """
    if value.is_inference() and not torch.is_inference_mode_enabled():
        with torch.inference_mode():
            return like(tensor, value)
    if type(tensor) in (nn.Parameter, AwayParameter):
        return nn.Parameter(value, requires_grad=tensor.requires_grad)
    if isinstance(tensor, nn.Parameter):
        return type(tensor)(value, requires_grad=tensor.requires_grad, **tensor.__dict__)
    return value


def put(module: nn.Module, name: str, value: torch.Tensor) -> None:
    """Let `value` stand in a parameter's or buffer's place. Past `setattr`, which would look it up in each table."""
    owner, leaf = (module, name) if "." not in name else owner_of(module, name)
    if leaf in owner._parameters:
        owner._parameters[leaf] = value  # type: ignore[assignment]  # a Parameter there, by like
    else:
        owner._buffers[leaf] = value


def tensors_of(module: nn.Module, *, recurse: bool) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield name, tensor and whether it is a buffer, of the module and, if asked, of those within."""
    for name, parameter in module.named_parameters(recurse=recurse, remove_duplicate=False):
        yield name, parameter, False
    for name, buffer in module.named_buffers(recurse=recurse, remove_duplicate=False):
        yield name, buffer, True


def place(module: nn.Module, name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Move a parameter or buffer for good; a parameter keeps its identity, so that whoever else holds it follows."""
    if tensor.device == device:
        return
    if isinstance(tensor, nn.Parameter):
        tensor.data = tensor.data.to(device)
    else:
        put(module, name, like(tensor, tensor.detach().to(device)))


def owner_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module within that a tensor belongs to, and the tensor's name there."""
    path, _, leaf = name.rpartition(".")
    return (module.get_submodule(path) if path else module), leaf


def stand_in(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return what stands in a parameter's place in those modules that share it and are offloaded."""
    return _PLACEHOLDERS.get(tensor)
