"""Put the hooks that align devices on the modules of a model, as a device map asks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from torch import nn

from trainwright.bigmodels.dispatch.align import AlignDevicesHook, TiedParams, WeightsMap, note_shared
from trainwright.bigmodels.dispatch.model_hooks import add_hook_to_module
from trainwright.bigmodels.weights.moving import Device
from trainwright.bigmodels.weights.weights_map import PrefixedDataset
from trainwright.strategies.offload.prefetch import Prefetcher


class _Hooking(NamedTuple):
    """What all hooks of one model have in common."""

    weights_map: WeightsMap | None = None
    offload_buffers: bool = False
    skip_keys: str | list[str] | None = None
    preload: frozenset[str] = frozenset()
    tied: TiedParams | None = None
    prefetcher: Prefetcher | None = None


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Device,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedParams | None = None,
) -> None:
    """Have a module and all modules within it that hold weights run on a device; those with a hook keep theirs.

    Args:
        module: is changed; its weights move there.
        execution_device: where they run.
        skip_keys: see `AlignDevicesHook`.
        preload_module_classes: names of classes whose inner modules get no hook: they run where the outer one does.
        tied_params_map: see `AlignDevicesHook`.
    """
    preload = frozenset(preload_module_classes or ())
    _attach_execution(module, execution_device, _Hooking(skip_keys=skip_keys, preload=preload, tied=tied_params_map))


def _attach_execution(module: nn.Module, device: Device, options: _Hooking) -> None:
    if "_hf_hook" not in module.__dict__ and _holds_tensors(module, recurse=True):
        hook = AlignDevicesHook(device, skip_keys=options.skip_keys, tied_params_map=options.tied)
        add_hook_to_module(module, hook)
    if type(module).__name__ in options.preload:
        return
    for child in module.children():
        _attach_execution(child, device, options)


def _comes_whole(module: nn.Module, options: _Hooking) -> bool:
    """Say whether a module uses weights of the modules within it without calling them."""
    return type(module).__name__ in options.preload or isinstance(module, nn.MultiheadAttention)  # its out_proj


def _holds_tensors(module: nn.Module, *, recurse: bool) -> bool:
    if next(module.parameters(recurse=recurse), None) is not None:
        return True
    return next(module.buffers(recurse=recurse), None) is not None


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
    """Put an `AlignDevicesHook` on each module that holds weights of its own, beside the hooks that are there.

    Args:
        module: is changed, with all modules within it.
        execution_device: where they run.
        offload: keep their weights away between forwards.
        weights_map: the weights by their names in the whole model; a copy on the CPU for each unless given.
        offload_buffers: see `AlignDevicesHook`.
        module_name: the module's name in the whole model.
        skip_keys: see `AlignDevicesHook`.
        preload_module_classes: names of classes whose offloaded weights, with all within, come and go as one: for
            modules that use a submodule's weight without calling it.
        tied_params_map: see `AlignDevicesHook`.
        prefetcher: see `AlignDevicesHook`.
    """
    preload = frozenset(preload_module_classes or ())
    options = _Hooking(weights_map, offload_buffers, skip_keys, preload, tied_params_map, prefetcher)
    _attach_align(module, execution_device, offload, module_name, options)
    note_shared(module)


def _attach_align(module: nn.Module, device: Device | None, offload: bool, module_name: str, options: _Hooking) -> None:
    whole = offload and _comes_whole(module, options)
    prefix = f"{module_name}." if module_name else ""
    if whole or _holds_tensors(module, recurse=False):
        weights_map = None if options.weights_map is None else PrefixedDataset(options.weights_map, prefix)
        hook = AlignDevicesHook(
            device,
            offload,
            weights_map=weights_map,
            offload_buffers=options.offload_buffers,
            place_submodules=whole,
            skip_keys=options.skip_keys,
            tied_params_map=options.tied,
            prefetcher=options.prefetcher,
        )
        add_hook_to_module(module, hook, append=True)
    if not whole:
        for name, child in module.named_children():
            _attach_align(child, device, offload, prefix + name, options)


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
    """Put hooks on the blocks of a model: each runs on its own device, with its weights offloaded or not.

    Args:
        module: is changed, with all modules within it.
        execution_device: one for all, or by the blocks' names; `""` is the model itself.
        offload: one for all, or by the blocks' names.
        weights_map: see `attach_align_device_hook`.
        offload_buffers: see `AlignDevicesHook`.
        module_name: the module's name in the whole model.
        skip_keys: see `AlignDevicesHook`.
        preload_module_classes: see `attach_align_device_hook`.
        tied_params_map: see `AlignDevicesHook`.
        prefetcher: see `AlignDevicesHook`.
    """
    preload = frozenset(preload_module_classes or ())
    options = _Hooking(weights_map, offload_buffers, skip_keys, preload, tied_params_map, prefetcher)
    if not isinstance(execution_device, Mapping) and not isinstance(offload, Mapping):
        if offload:
            _attach_align(module, execution_device, True, module_name, options)
            note_shared(module)
        else:
            hook = AlignDevicesHook(execution_device, io_same_device=True, place_submodules=True, skip_keys=skip_keys)
            add_hook_to_module(module, hook, append=True)
        return
    names = {name for name, _ in module.named_modules(prefix=module_name)}
    devices = execution_device if isinstance(execution_device, Mapping) else dict.fromkeys(names, execution_device)
    offloads = offload if isinstance(offload, Mapping) else dict.fromkeys(devices, offload)
    _attach_blocks(module, devices, offloads, module_name, options)
    note_shared(module)


def _attach_blocks(
    model: nn.Module,
    devices: Mapping[str, Device | None],
    offloads: Mapping[str, bool],
    module_name: str,
    options: _Hooking,
) -> None:
    """Put a hook on each module that holds weights, itself or within: any may be called with foreign inputs."""
    entries = devices.keys() & offloads.keys()
    whole: tuple[str, ...] = ()  # prefixes of modules whose weights come and go with an outer one's
    for path, module in model.named_modules(prefix=module_name):
        if whole and f"{path}.".startswith(whole):
            continue
        prefix = f"{path}." if path else ""
        own = {name for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))}
        singly = {name for name in own if prefix + name in entries}
        block = innermost(path, entries)
        if block is not None:
            is_whole = offloads[block] and _comes_whole(module, options)
            if is_whole:
                whole = (*whole, prefix)
            if is_whole or path in entries or _holds_tensors(module, recurse=True):
                offload = offloads[block] and (is_whole or bool(own - singly))
                names = None if is_whole else frozenset(own - singly)
                _add_block_hook(module, path, devices[block], offload, options, place_submodules=is_whole, names=names)
        elif path == "":
            _add_block_hook(module, path, devices.get(""), False, options, names=frozenset())
        for name in sorted(singly):
            entry = prefix + name
            _add_block_hook(
                module, path, devices[entry], offloads[entry], options, names=frozenset({name}), is_single=True
            )


def _add_block_hook(
    module: nn.Module,
    path: str,
    device: Device | None,
    offload: bool,
    options: _Hooking,
    *,
    place_submodules: bool = False,
    names: frozenset[str] | None = None,
    is_single: bool = False,
) -> None:
    weights_map = None
    if offload and options.weights_map is not None:
        weights_map = PrefixedDataset(options.weights_map, f"{path}." if path else "")
    hook = AlignDevicesHook(
        device,
        offload,
        io_same_device=path == "" and not is_single,
        weights_map=weights_map,
        offload_buffers=options.offload_buffers,
        place_submodules=place_submodules,
        skip_keys=options.skip_keys,
        tied_params_map=options.tied,
        prefetcher=options.prefetcher if offload else None,
        tensor_names=names,
    )
    add_hook_to_module(module, hook, append=True)


def innermost(name: str, entries: Collection[str]) -> str | None:
    """Return the entry of a device map that a module or tensor belongs to: its own, or the nearest one around it."""
    while name not in entries:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return name
