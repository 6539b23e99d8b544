"""Undo the placement of a model: remove its hooks, or restore it after an error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from trainwright.bigmodels.dispatch.align import AlignDevicesHook, offloading_hooks
from trainwright.bigmodels.dispatch.model_hooks import (
    ModelHook,
    SequentialHook,
    hook_of,
    hooks_of,
    set_hook,
)
from trainwright.bigmodels.dispatch.moves import MOVES, add_left_on_disk
from trainwright.bigmodels.weights.stored_weights import StoredWeights


@contextlib.contextmanager
def restored_on_failure(model: nn.Module) -> Iterator[None]:
    """Restore a model if the block raises: modules, tensors, devices, hooks and offloaded weights.

    Values that were overwritten in place are not restored. Tensors stay allocated until the block ends.
    """
    tables = [
        (module, hook_of(module), dict(module._parameters), dict(module._buffers), dict(module._modules))
        for module in model.modules()
    ]
    moves = [(module, _moves(module)) for module in model.modules()]
    devices = [(parameter, parameter.device) for parameter in model.parameters()]
    kept = [(hook, hook.remembered()) for module in model.modules() for hook in offloading_hooks(module)]
    try:
        yield
    except BaseException:
        for module, hook, parameters, buffers, modules in tables:
            if hook_of(module) is not hook:
                set_hook(module, hook)
            _refill(module._parameters, parameters)
            _refill(module._buffers, buffers)
            _refill(module._modules, modules)
        for module, former in moves:
            for name in _moves(module):
                del module.__dict__[name]
            module.__dict__.update(former)
        for aligning, remembered in kept:
            aligning.remember(remembered)
        for parameter, device in devices:
            if parameter.device != device:  # in place, for other references to the parameter
                parameter.data = parameter.data.to(device)
        raise


def _moves(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that replace a module's methods for moving it."""
    return {name: module.__dict__[name] for name in MOVES if name in module.__dict__}


def _refill(table: dict[str, Any], former: dict[str, Any]) -> None:
    table.clear()
    table.update(former)


def remove_placement(model: nn.Module) -> None:
    """Remove the hooks that align devices from a model, without reading or copying weights. Other hooks stay.

    Weights that hooks kept in memory are in the modules again. Weights in files stay on the meta device, and are
    recorded as left on disk. Call this inside `restored_on_failure`.
    """
    left = StoredWeights()
    paths: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(f"{path}." if path else "")
    for module, prefixes in paths.items():
        others: list[ModelHook] = []
        for each in hooks_of(module):
            if not isinstance(each, AlignDevicesHook):
                others.append(each)
                continue
            in_files = each.release(module)
            for name in in_files:
                for prefix in prefixes:
                    left.add(prefix + name, in_files[name], in_files.locate(name))
        if hook_of(module) is not None:
            set_hook(module, SequentialHook(*others) if len(others) > 1 else next(iter(others), None))
    if left:
        add_left_on_disk(model, left)
