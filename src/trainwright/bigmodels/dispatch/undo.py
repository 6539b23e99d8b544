"""Removal of a model's hooks, and restoration of a model after an error."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator

from torch import nn

from trainwright.bigmodels.dispatch.align import AlignDevicesHook, offloading_hooks
from trainwright.bigmodels.dispatch.model_hooks import ModelHook, SequentialHook, hook_of, hooks_of, set_hook
from trainwright.bigmodels.dispatch.moves import refuse_moves


@contextlib.contextmanager
def restored_on_failure(model: nn.Module) -> Iterator[None]:
    """Return a context that restores a model's modules, tensors, devices, hooks and offloaded weights after an error.

    Values that were overwritten in place are not restored. Tensors stay allocated until the context ends.
    """
    # Attributes of the modules, and their dicts of parameters, buffers, hooks and so on. Each with a shallow copy.
    tables = []
    hooks = []  # hooks that offload, each with a copy of its attributes
    for module in model.modules():
        for table in (module.__dict__, *module.__dict__.values()):
            if type(table) in (dict, OrderedDict):
                tables.append((table, dict(table)))
        for hook in offloading_hooks(module):
            hooks.append((hook, hook.__dict__.copy()))
    devices = [(parameter, parameter.device) for parameter in model.parameters()]
    try:
        yield
    except BaseException:
        for table, former in tables:
            table.clear()
            table.update(former)
        for hook, state in hooks:
            hook.__dict__.update(state)
            hook.forget()  # discards prefetched weights
        for parameter, device in devices:
            if parameter.device != device:  # in place, for other references to the parameter
                parameter.data = parameter.data.to(device)
        raise


def remove_placement(model: nn.Module) -> None:
    """Remove the hooks that align devices from a model, without reading or copying weights. Other hooks stay.

    Weights that hooks store in memory are put back into the modules. Weights in files keep their placeholders, and the
    model cannot be moved. Must be called in `restored_on_failure`, because an error leaves some hooks removed.
    """
    has_files = False
    for module in model.modules():
        others: list[ModelHook] = []
        for each in hooks_of(module):
            if not isinstance(each, AlignDevicesHook):
                others.append(each)
            elif each.release(module):
                has_files = True
        if hook_of(module) is None:
            continue
        # Without `detach_hook`, which would read the weights.
        if len(others) > 1:
            set_hook(module, SequentialHook(*others))
        else:
            set_hook(module, others[0] if others else None)
    if has_files:
        refuse_moves(model)  # again, because `set_hook` calls `allow_moves`
