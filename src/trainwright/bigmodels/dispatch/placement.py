"""Remove a model's placement, undo a placement that failed, and find weights that no placement covers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from trainwright.bigmodels.dispatch.align import AlignDevicesHook, offloading_hooks
from trainwright.bigmodels.dispatch.model_hooks import (
    ModelHook,
    SequentialHook,
    before_next_forward,
    hook_of,
    hooks_of,
    set_hook,
)
from trainwright.bigmodels.dispatch.moves import MOVES, add_left_on_disk
from trainwright.bigmodels.weights.stored_weights import StoredWeights
from trainwright.core.errors import ConfigurationError


@contextlib.contextmanager
def restored_on_failure(model: nn.Module) -> Iterator[None]:
    """Restore a model if the block raises: modules, parameters, buffers, devices, hooks and offloaded weights.

    Values that were overwritten in place are not restored.

    Args:
        model: Its tensors stay allocated until the block ends.
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


def take_back(model: nn.Module) -> None:
    """Remove the hooks that align devices from a model, without reading or copying weights. Other hooks stay.

    Weights that hooks kept in memory are in the modules again. Weights in files stay on the meta device, and are
    recorded as left on disk.

    Args:
        model: Is changed. Call this inside `restored_on_failure`.
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


def check_first_forward(model: nn.Module) -> None:
    """Check the weights of each part of an offloaded model before the part's first forward.

    The forward raises ConfigurationError if a weight of the part is on the meta device and no hook loads it. An adapter
    that is added to an offloaded model gets such weights, and torch multiplies them on the CPU without an error. Each
    part is checked, because wrappers such as peft's do not call the model itself.
    """
    for module in model.modules():
        if module._modules:
            before_next_forward(module, _refuse_uninitialized)


def _refuse_uninitialized(module: nn.Module) -> None:
    known: set[tuple[int, str]] = set()
    for part in module.modules():
        for hook in offloading_hooks(part):
            if hook.execution_device is not None and hook.execution_device.type == "meta":
                return  # no tensor has values there
            known |= hook.places(part)
    found: list[str] = []
    for path, part in module.named_modules():
        for table in (part._parameters, part._buffers):
            names = [name for name, tensor in table.items() if tensor is not None and tensor.is_meta]
            found += [f"{path}.{name}".lstrip(".") for name in names if (id(table), name) not in known]
    if found:
        raise ConfigurationError(
            f"{len(found)} weights in {type(module).__name__} are on the meta device and have no values, {found[0]!r} "
            "first: they were added to the model, or moved, after it was offloaded. Add an adapter before "
            "dispatch_model, cpu_offload or disk_offload, or train the model with strategy='offload'."
        )
