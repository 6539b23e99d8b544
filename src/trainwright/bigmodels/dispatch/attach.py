"""Add an `AlignDevicesHook` to the modules of a model, and check that the hooks load all of the model's weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from trainwright.bigmodels.dispatch.align import (
    AlignDevicesHook,
    TiedParams,
    WeightsMap,
    note_shared,
    offloading_hooks,
)
from trainwright.bigmodels.dispatch.model_hooks import add_hook_to_module, before_next_forward
from trainwright.bigmodels.weights.moving import Device
from trainwright.bigmodels.weights.placeholders import Placeholders
from trainwright.bigmodels.weights.slots import tensors_of
from trainwright.bigmodels.weights.weights_map import PrefixedDataset
from trainwright.core.errors import ConfigurationError
from trainwright.strategies.offload.prefetch import Prefetcher


@dataclass(frozen=True)
class _HookArguments:
    """Arguments that all hooks of one model share. See `AlignDevicesHook` and `attach_align_device_hook`."""

    weights_map: WeightsMap | None
    offload_buffers: bool
    skip_keys: str | list[str] | None
    preload: Collection[str]  # `preload_module_classes`
    prefetcher: Prefetcher | None
    placeholders: Placeholders = field(default_factory=Placeholders)

    def is_loaded_as_one(self, module: nn.Module) -> bool:
        """Return whether a module's weights are loaded with those of its submodules, because it does not call these."""
        # nn.MultiheadAttention uses the weight of its `out_proj` in a function.
        return type(module).__name__ in self.preload or isinstance(module, nn.MultiheadAttention)


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Device,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedParams | None = None,
) -> None:
    """Add hooks that run a module and its submodules with weights on a device. Modules with a hook keep their hook.

    Args:
        module: The module, which is changed in place. Its weights are moved to the device.
        execution_device: The device.
        skip_keys: See `AlignDevicesHook`.
        preload_module_classes: Names of classes whose submodules do not get hooks. They run on the device of the outer
            module.
        tied_params_map: Accepted without effect: in Accelerate it saves memory, and the results are the same.
    """
    if "_hf_hook" not in module.__dict__ and _holds_tensors(module):
        add_hook_to_module(module, AlignDevicesHook(execution_device, skip_keys=skip_keys))
    if type(module).__name__ not in (preload_module_classes or ()):
        for child in module.children():
            attach_execution_device_hook(child, execution_device, skip_keys, preload_module_classes)


def _holds_tensors(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None or next(module.buffers(), None) is not None


def attach_align_device_hook(
    module: nn.Module,
    execution_device: Device | None = None,
    offload: bool = False,
    weights_map: WeightsMap | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedParams | None = None,
    *,
    prefetcher: Prefetcher | None = None,
) -> None:
    """Add an `AlignDevicesHook` to each module that has weights of its own. Existing hooks stay.

    Args:
        module: The module, which is changed in place with all its submodules.
        execution_device: The device that runs the modules. For None, see `AlignDevicesHook`.
        offload: Offload the modules' weights between forwards.
        weights_map: Name of a weight in the full model → its value. Default: copies of the weights on the CPU.
        module_name: The name of the module in the full model. Default: `""`, the full model.
        preload_module_classes: Names of classes whose offloaded weights, including those of submodules, are loaded
            together. Required for modules that use the weight of a submodule without calling it.
        offload_buffers, skip_keys, tied_params_map, prefetcher: See `AlignDevicesHook`.
    """
    options = _HookArguments(weights_map, offload_buffers, skip_keys, preload_module_classes or (), prefetcher)
    _attach(module, {module_name: execution_device}, {module_name: offload}, module_name, options, outer=False)


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: Device | Mapping[str, Device] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: WeightsMap | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedParams | None = None,
    *,
    prefetcher: Prefetcher | None = None,
) -> None:
    """Add hooks to a model. Each block (a module or tensor that the maps name) has its own device and offloading.

    Args:
        module: Modified in place, with all its submodules.
        execution_device: One device, or a map: name of a block → device. `""` is the model itself.
        offload: Offload the weights between forwards. One value, or a map: name of a block → value. Only names that are
            in both maps count.
        weights_map, module_name, preload_module_classes: See `attach_align_device_hook`.
        offload_buffers, skip_keys, tied_params_map, prefetcher: See `AlignDevicesHook`.
    """
    options = _HookArguments(weights_map, offload_buffers, skip_keys, preload_module_classes or (), prefetcher)
    if isinstance(execution_device, Mapping) or isinstance(offload, Mapping):
        devices: Mapping[str, Device | None]
        if isinstance(execution_device, Mapping):
            devices = execution_device
        else:
            names = {name for name, _ in module.named_modules(prefix=module_name)}
            devices = dict.fromkeys(names, execution_device)
        offloads = offload if isinstance(offload, Mapping) else dict.fromkeys(devices, offload)
        _attach(module, devices, offloads, module_name, options, outer=True)
    elif offload:
        _attach(module, {module_name: execution_device}, {module_name: True}, module_name, options, outer=False)
    else:  # the full model is on one device, and one hook moves it with its inputs
        hook = AlignDevicesHook(execution_device, io_same_device=True, place_submodules=True, skip_keys=skip_keys)
        add_hook_to_module(module, hook, append=True)


class _PlannedHook(NamedTuple):
    """A hook to add to a module.

    Attributes:
        device: The device of the forward.
        offload: The hook offloads the tensors between forwards.
        tensor_names: Tensors of the module that the hook moves or offloads. Empty for a hook that only moves the inputs
            of calls. None: all tensors, including those of submodules.
    """

    device: Device | None
    offload: bool
    tensor_names: frozenset[str] | None


class _Blocks:
    """The blocks of a model: the modules and tensors with an entry in both maps.

    Args:
        devices: Name of a block → its device.
        offloads: Name of a block → True if its weights are offloaded between forwards.
        outer: Modules whose submodules have weights get a hook, too, which moves the inputs of a call to the device of
            the module. The full model then returns its output on the device of its input.
    """

    def __init__(self, devices: Mapping[str, Device | None], offloads: Mapping[str, bool], *, outer: bool) -> None:
        self.devices = devices
        self.offloads = offloads
        self.outer = outer
        self._names = devices.keys() & offloads.keys()

    def block_of(self, path: str) -> str | None:
        """Return the name of the innermost block that contains a module, or None."""
        return innermost(path, self._names)

    def hook_of_module(self, module: nn.Module, path: str, *, is_loaded_as_one: bool) -> _PlannedHook | None:
        """Return the hook for the tensors of a module without entries of their own, or None if it needs no hook."""
        block = self.block_of(path)
        if block is None:
            if self.outer and path == "":  # the model is in no block: its hook only moves the input and the output
                return _PlannedHook(self.devices.get(""), False, frozenset())
            return None
        device = self.devices[block]
        if is_loaded_as_one:
            return _PlannedHook(device, True, None)
        own_names = _own_names(module)
        moves_inputs = self.outer and (path == block or _holds_tensors(module))
        if not own_names and not moves_inputs:
            return None
        names = own_names - set(self.names_with_entry(module, path))
        return _PlannedHook(device, self.offloads[block] and bool(names), names)

    def names_with_entry(self, module: nn.Module, path: str) -> list[str]:
        """Return the names of the tensors of a module that are blocks themselves."""
        names = []
        for name in sorted(_own_names(module)):
            entry = f"{path}.{name}" if path else name
            if entry in self._names:
                names.append(name)
        return names


def _own_names(module: nn.Module) -> frozenset[str]:
    """Return the names of the tensors that belong directly to a module."""
    return frozenset(name for name, _, _ in tensors_of(module, recurse=False))


def _attach(
    model: nn.Module,
    devices: Mapping[str, Device | None],
    offloads: Mapping[str, bool],
    module_name: str,
    options: _HookArguments,
    *,
    outer: bool,
) -> None:
    """Add a hook to each module that has weights, and one for each tensor that has its own entry in the maps.

    For example, a linear layer `"head"` gets two hooks if the maps have the entries `"head"` and `"head.bias"`: one for
    the weight, and one for the bias. See `_Blocks` for `devices`, `offloads` and `outer`.
    """
    blocks = _Blocks(devices, offloads, outer=outer)
    loaded_with_outer: tuple[str, ...] = ()  # prefixes of modules whose weights are loaded as one
    for path, module in model.named_modules(prefix=module_name):
        prefix = f"{path}." if path else ""
        if loaded_with_outer and prefix.startswith(loaded_with_outer):
            continue
        block = blocks.block_of(path)
        is_loaded_as_one = block is not None and offloads[block] and options.is_loaded_as_one(module)
        if is_loaded_as_one:
            loaded_with_outer = (*loaded_with_outer, prefix)
        planned = blocks.hook_of_module(module, path, is_loaded_as_one=is_loaded_as_one)
        if planned is not None:
            hook = _make_hook(planned, prefix, options, is_outermost=outer and path == "")
            add_hook_to_module(module, hook, append=True)
        for name in blocks.names_with_entry(module, path):
            entry = prefix + name
            planned = _PlannedHook(devices[entry], offloads[entry], frozenset({name}))
            add_hook_to_module(module, _make_hook(planned, prefix, options), append=True)
    # After all modules have their hooks, which decide the tensors that remain in memory.
    note_shared(model)


def _make_hook(
    planned: _PlannedHook, prefix: str, options: _HookArguments, *, is_outermost: bool = False
) -> AlignDevicesHook:
    """Create a planned hook of the module whose weights have the name `prefix`. `is_outermost`: of the full model."""
    weights_map = None
    if planned.offload and options.weights_map is not None:
        weights_map = PrefixedDataset(options.weights_map, prefix)
    hook = AlignDevicesHook(
        planned.device,
        planned.offload,
        io_same_device=is_outermost,
        weights_map=weights_map,
        offload_buffers=options.offload_buffers,
        place_submodules=planned.tensor_names is None,
        skip_keys=options.skip_keys,
        prefetcher=options.prefetcher if planned.offload else None,
        tensor_names=planned.tensor_names,
    )
    hook.placeholders = options.placeholders
    return hook


def check_first_forward(model: nn.Module) -> None:
    """Check the weights of each module with submodules in an offloaded model before the module's first forward.

    The forward raises ConfigurationError if a weight is on the meta device and no hook loads it. An adapter that is
    added to an offloaded model gets meta weights, and torch multiplies meta weights on the CPU without an error. Each
    module is checked separately, because wrappers such as peft's do not call the full model.
    """
    for module in model.modules():
        if module._modules:
            before_next_forward(module, _check_initialized)


def _check_initialized(module: nn.Module) -> None:
    """Raise ConfigurationError if a weight in `module` is on the meta device and no hook loads it."""
    offloaded: set[tuple[int, str]] = set()
    for part in module.modules():
        for hook in offloading_hooks(part):
            if hook.execution_device is not None and hook.execution_device.type == "meta":
                return  # no tensor has values there
            offloaded |= hook.offloaded_entries(part)
    found: list[str] = []
    for path, part in module.named_modules():
        for table in (part._parameters, part._buffers):
            for name, tensor in table.items():
                is_empty = tensor is not None and tensor.is_meta
                if is_empty and (id(table), name) not in offloaded:
                    found.append(f"{path}.{name}".lstrip("."))
    if found:
        raise ConfigurationError(
            f"{len(found)} weights in {type(module).__name__} are on the meta device and have no values, {found[0]!r} "
            "first: they were added to the model, or moved, after it was offloaded. Add an adapter before "
            "dispatch_model, cpu_offload or disk_offload, or train the model with strategy='offload'."
        )


def innermost(name: str, entries: Collection[str]) -> str | None:
    """Return `name` if it is in `entries`, or else the closest module in `entries` that contains it, or else None.

    The full model is `""`. For `"a.b.c"` and the entries `""` and `"a"`, return `"a"`.
    """
    while name not in entries:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return name
