"""Take a model's old placement back, so that it can be placed anew: hooks go, and no weight is read or copied."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trainwright.bigmodels.dispatch.align import AlignDevicesHook
from trainwright.bigmodels.dispatch.left_on_disk import add_left_on_disk
from trainwright.bigmodels.dispatch.model_hooks import ModelHook, SequentialHook, hook_of, hooks_of, set_hook
from trainwright.bigmodels.weights.mapped_file import FileSpan
from trainwright.bigmodels.weights.slots import stand_in
from trainwright.bigmodels.weights.stored_weights import StoredWeights


class TakenBack:
    """Where those weights of a model lie in files that hooks have kept there until now."""

    def __init__(self) -> None:
        self._places: dict[Any, tuple[torch.Tensor, FileSpan]] = {}

    def add(self, value: torch.Tensor, span: FileSpan) -> None:
        """Add a view of a file."""
        self._places[_key(value)] = (value, span)

    def find(self, tensor: torch.Tensor) -> tuple[torch.Tensor, FileSpan] | None:
        """Return where a tensor of the model lies, if it is such a view as it is in the file."""
        return self._places.get(_key(tensor)) if tensor.numel() and not tensor.is_meta else None


def _key(tensor: torch.Tensor) -> Any:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def take_back(model: nn.Module) -> TakenBack:
    """Take the hooks that align devices off a model; hooks of other kinds stay.

    What hooks kept in memory stands in the modules again. What they kept in a file does so as a view of the file, where
    the model had values before it was offloaded; else it stays on the meta device, and is noted as left on the disk.

    Args:
        model: is changed; use `restored_on_failure` around this and what follows.
    """
    taken, left = TakenBack(), StoredWeights()
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by the placeholder's id: that, and what it stands for
    for parameter in model.parameters():
        placeholder = None if parameter.is_meta else stand_in(parameter)
        if placeholder is not None:
            made[id(placeholder)] = (placeholder, parameter)
    paths: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(f"{path}." if path else "")
    for module, prefixes in paths.items():
        others: list[ModelHook] = []
        for each in hooks_of(module):
            if not isinstance(each, AlignDevicesHook):
                others.append(each)
                continue
            for name, value, span, is_back in each.take_back(module, made):
                if is_back:
                    taken.add(value, span)
                for prefix in () if is_back else prefixes:
                    left.add(prefix + name, value, span)
        if hook_of(module) is not None:
            set_hook(module, SequentialHook(*others) if len(others) > 1 else next(iter(others), None))
    if left:
        add_left_on_disk(model, left)
    return taken
