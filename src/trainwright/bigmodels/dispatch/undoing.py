"""Put a model back as it was when a call that changes it in many places fails in one of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from trainwright.bigmodels.dispatch.align import offloading_hooks
from trainwright.bigmodels.dispatch.model_hooks import MOVES, hook_of, set_hook


@contextlib.contextmanager
def restored_on_failure(model: nn.Module) -> Iterator[None]:
    """Undo what the block did to a model if it raises: modules, parameters, buffers, devices, hooks, and what hooks
    keep away. Values that were written over in place stay.

    Args:
        model: its present tensors are kept until the block ends.
    """
    tables = [
        (module, hook_of(module), dict(module._parameters), dict(module._buffers), dict(module._modules))
        for module in model.modules()
    ]
    refusals = [(module, _refusals(module)) for module in model.modules()]
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
        for module, refused in refusals:
            for name in _refusals(module):
                del module.__dict__[name]
            module.__dict__.update(refused)
        for aligning, remembered in kept:
            aligning.remember(remembered)
        for parameter, device in devices:
            if parameter.device != device:  # moved in place, so that whoever else holds it follows
                parameter.data = parameter.data.to(device)
        raise


def _refusals(module: nn.Module) -> dict[str, Any]:
    """Return what stands in the place of methods that would move a module."""
    return {name: module.__dict__[name] for name in ("to", *MOVES) if name in module.__dict__}


def _refill(table: dict[str, Any], former: dict[str, Any]) -> None:
    table.clear()
    table.update(former)
