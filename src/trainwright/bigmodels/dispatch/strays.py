"""Find weights that came into an offloaded model afterwards and have no values, before anything is computed with them.

Whoever adds a layer to an offloaded model, as an adapter does, and moves it to where the model's weights seem to be,
moves it to the meta device. torch multiplies such weights on the CPU without an error, with whatever lies in memory.
"""

from __future__ import annotations

from torch import nn

from trainwright.bigmodels.dispatch.align import offloading_hooks
from trainwright.bigmodels.dispatch.model_hooks import before_next_forward
from trainwright.core.errors import ConfigurationError


def look_at_first_forward(model: nn.Module) -> None:
    """Have each part of an offloaded model look at its weights before its first forward, and never again.

    That forward raises ConfigurationError where a weight within the part is on the meta device and no hook brings it,
    or where its hook is on a module that is never called, as a ParameterList is not. All parts look, not the
    model alone: wrappers such as peft's go round the model's own call.
    """
    for module in model.modules():
        if module._modules:
            before_next_forward(module, _look)


def _look(module: nn.Module) -> None:
    _refuse_uncalled(module)
    _refuse_strays(module)


def _refuse_uncalled(module: nn.Module) -> None:
    for path, part in module.named_modules():
        names = [slot for hook in offloading_hooks(part) for _, slot in sorted(hook.places(part))]
        if not names or part is module or _has_forward(part):
            continue
        owner = path
        while not _has_forward(module.get_submodule(owner)) and owner:
            owner = owner.rpartition(".")[0]
        raise ConfigurationError(
            f"{f'{path}.{names[0]}'!r} is offloaded and would not be brought: {type(part).__name__} has no forward, at "
            "which its weights come. Have them come with those of the module that uses them: "
            f"preload_module_classes=[{type(module.get_submodule(owner)).__name__!r}]."
        )


def _has_forward(module: nn.Module) -> bool:
    return "forward" in module.__dict__ or type(module).forward is not nn.Module.forward


def _refuse_strays(module: nn.Module) -> None:
    known: set[tuple[int, str]] = set()
    for part in module.modules():
        for hook in offloading_hooks(part):
            if hook.execution_device is not None and hook.execution_device.type == "meta":
                return  # nothing has values there, nor needs them
            known |= hook.places(part)
    found: list[str] = []
    for path, part in module.named_modules():
        for table in (part._parameters, part._buffers):
            names = [name for name, tensor in table.items() if tensor is not None and tensor.is_meta]
            found += [f"{path}.{name}".lstrip(".") for name in names if (id(table), name) not in known]
    if found:
        raise ConfigurationError(
            f"{len(found)} weights in {type(module).__name__} are on the meta device and have no values, {found[0]!r} "
            "first: they came into the model, or were moved, after it was offloaded. Add an adapter before "
            "dispatch_model, cpu_offload or disk_offload, or train the model with strategy='offload'."
        )
