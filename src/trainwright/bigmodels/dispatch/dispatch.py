"""Distribution of a model over devices, host memory and the disk. The model can be called like any other model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from trainwright.bigmodels.dispatch.align import has_offloaded_params
from trainwright.bigmodels.dispatch.attach import (
    attach_align_device_hook_on_blocks,
    check_first_forward,
    innermost,
)
from trainwright.bigmodels.dispatch.model_hooks import CpuOffload, UserCpuOffloadHook, add_hook_to_module
from trainwright.bigmodels.dispatch.moves import refuse_moves
from trainwright.bigmodels.dispatch.undo import remove_placement, restored_on_failure
from trainwright.bigmodels.dispatch.weight_places import WeightPlaces
from trainwright.bigmodels.maps.device_map import check_device_map, resolve_device_map
from trainwright.bigmodels.weights.moving import Device, check_available, checked_device, default_device, to_device
from trainwright.core.host.device_types import properties
from trainwright.strategies.offload.prefetch import Prefetcher

PathLike = str | os.PathLike[str]


def dispatch_model(
    model: nn.Module,
    device_map: str | Mapping[str, Device] | None = None,
    main_device: Device | None = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    offload_dir: PathLike | None = None,
    offload_index: Mapping[str, Mapping[str, Any]] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
    *,
    strict: bool = False,
    prefetch_bytes: int | None = None,
) -> nn.Module:
    """Move each part of a model to its device in a device map, and add hooks that run the part.

    Args:
        model: Modified in place. The previous placement of a dispatched or offloaded model is removed first. Values of
            tensors on the meta device must be in `state_dict`, in `offload_dir`, or in files of an earlier load to the
            disk.
        device_map: Module name → device, `"cpu"` or `"disk"`, such as `{"": "disk"}`. The map must cover the model.
            Parameters whose names end with one of the model's `_no_placement_params` may be left out. `"auto"`,
            `"balanced"`, `"balanced_low_0"` and `"sequential"` compute a map for the free memory, without splitting the
            classes in the model's `_no_split_modules`. Default: `"auto"`.
        main_device: The device that runs the modules whose weights are on the CPU or the disk. Default: the first
            accelerator of the map. If all weights are on the disk, the current accelerator. Otherwise the CPU.
        state_dict: Values of offloaded weights and of tensors on the meta device. If it contains several names of a
            tied weight, the value of the last one is used. Default: the model's values.
        offload_dir: Folder to which weights on the disk are written. Not needed for weights of a safetensors checkpoint
            that was loaded to the disk, and for weights that a previous call has written.
        offload_index: Index of the files in `offload_dir`. Default: the folder's `index.json`.
        offload_buffers: Also offload buffers.
        skip_keys: Names of arguments that are not moved between devices, such as a cache.
        preload_module_classes: See `attach_align_device_hook`.
        force_hooks: Add hooks even if the full model is on one device.
        strict: Raise an error if the map has a name that the model does not have. Default: a warning names it.
        prefetch_bytes: Bytes that may be loaded before their use; 0 disables prefetching. See `Prefetcher`.

    Returns:
        The model, with the attribute `hf_device_map`.

    Raises:
        ConfigurationError: The map does not cover the model, a device is unknown or not on this machine, a folder is
            required, `prefetch_bytes` is invalid, or `strict` and a name is unknown.
        CheckpointError: Tensors have no values, or offloaded weights cannot be found or written.

    After an error, weights and files are unchanged.
    """
    checked = _checked_map(model, device_map, offload_buffers, strict)
    with restored_on_failure(model):
        remove_placement(model)
        attach_places(
            WeightPlaces(model, checked, state_dict, offload_dir, offload_index, offload_buffers=offload_buffers),
            main_device,
            skip_keys=skip_keys,
            preload_module_classes=preload_module_classes,
            force_hooks=force_hooks,
            prefetch_bytes=prefetch_bytes,
        )
    return model


def attach_places(
    places: WeightPlaces,
    main_device: Device | None = None,
    *,
    skip_keys: str | list[str] | None,
    preload_module_classes: list[str] | None,
    force_hooks: bool,
    prefetch_bytes: int | None,
) -> None:
    """Move the weights of a model to their places, and add hooks if it is on more than one device or on the disk.

    Call this inside `restored_on_failure`, after `remove_placement`. See `dispatch_model` for the arguments.
    """
    device_map = dict(places.device_map or {})
    devices = list(device_map.values())
    if force_hooks or len(set(devices)) > 1 or "disk" in devices:
        main = choose_main_device(devices, main_device)
        # If the main device is the CPU or shares its memory, weights on the CPU need not be copied for a forward.
        offloaded = {"disk"} if properties(main.type).is_unified else {"cpu", "disk"}
        _add_hooks(places, main, offloaded, skip_keys, preload_module_classes, prefetch_bytes)
    else:
        places.fill_empty()
        if devices:  # a map is empty for a model without weights
            places.model.to(to_device(devices[0]))
    places.model.hf_device_map = device_map  # type: ignore[assignment]  # modules type attributes as tensors


def _add_hooks(
    places: WeightPlaces,
    main: torch.device,
    offloaded: set[str],
    skip_keys: str | list[str] | None,
    preload_module_classes: list[str] | None,
    prefetch_bytes: int | None,
) -> None:
    """Add hooks to a model, and offload the weights whose map entry is in `offloaded`. Their modules run on `main`."""
    model = places.model
    device_map = places.device_map or {}
    # Everything that may fail for missing values comes before hooks are added.
    places.fill_empty()
    values = places.offload(offloaded)
    runs_on: dict[str, torch.device] = {}  # name in the map → device that runs this module
    for name, device in device_map.items():
        runs_on[name] = main if device in ("cpu", "disk") else to_device(device)
    runs_on.setdefault("", main)  # the full model's hook moves inputs, even if the map has no entry for it
    # Before hooks are added: they move parameters in place, and thus for all modules that share them.
    _separate_tied(model, device_map, runs_on)
    attach_align_device_hook_on_blocks(
        model,
        execution_device=runs_on,
        offload={name: device in offloaded for name, device in device_map.items()},
        weights_map=values,
        offload_buffers=places.offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        prefetcher=Prefetcher(prefetch_bytes),
    )
    if any(has_offloaded_params(module) for module in model.modules()):
        refuse_moves(model)
        check_first_forward(model)


def _checked_map(
    model: nn.Module, device_map: str | Mapping[str, Device] | None, offload_buffers: bool, strict: bool
) -> dict[str, Device]:
    """Return a map that covers the model and whose devices are on this machine."""
    if device_map is None or isinstance(device_map, str):
        no_split: Any = getattr(model, "_no_split_modules", None)
        return resolve_device_map(
            model,
            "auto" if device_map is None else device_map,
            no_split_module_classes=list(no_split or ()),
            offload_buffers=offload_buffers,
        )
    # Models of transformers define this attribute. Their parameters with these endings may be missing in the map, and
    # stay where they are. For the check, they get an entry.
    unplaced: Any = getattr(model, "_no_placement_params", None)
    endings = tuple(unplaced or ())
    optional = {name: "cpu" for name, _ in model.named_parameters() if name.endswith(endings)}
    # Elsewhere the CPU is compared with "cpu", so replace `torch.device("cpu")` and "cpu:0".
    checked = {name: "cpu" if str(device) in ("cpu", "cpu:0") else device for name, device in device_map.items()}
    check_device_map(model, optional | checked, strict=strict)
    check_available(checked)
    return checked


def choose_main_device(devices: list[Device], main_device: Device | None = None) -> torch.device:
    """Return `main_device`, or else its default in `dispatch_model` for the devices of a map.

    Raises:
        ConfigurationError: `main_device` is not on this machine.
    """
    if main_device is not None:
        return checked_device(main_device)
    first = next((device for device in devices if device not in ("cpu", "disk")), None)
    if first is not None:
        return to_device(first)
    return default_device() if set(devices) == {"disk"} else torch.device("cpu")


def _separate_tied(model: nn.Module, device_map: Mapping[str, Device], runs_on: Mapping[str, torch.device]) -> None:
    """Untie parameters that are shared by modules on different devices. Offloaded modules keep their ties."""
    first_devices: dict[int, torch.device] = {}  # id of a parameter → device of the first module that has it
    for path, module in model.named_modules():
        block = innermost(path, device_map)
        if block is None or device_map[block] in ("cpu", "disk"):
            continue
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            first_device = first_devices.setdefault(id(parameter), runs_on[block])
            if first_device != runs_on[block]:
                module._parameters[name] = nn.Parameter(parameter.detach(), parameter.requires_grad)


def _execution_device(model: nn.Module, execution_device: Device | None) -> torch.device:
    """Return `execution_device`, or else its default in `cpu_offload`."""
    if execution_device is not None:
        return checked_device(execution_device)
    first = next(model.parameters(), None)
    if first is None or first.device.type in ("cpu", "meta"):
        return default_device()
    return first.device


def cpu_offload(
    model: nn.Module,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    preload_module_classes: list[str] | None = None,
    *,
    prefetch_bytes: int | None = None,
) -> nn.Module:
    """Offload a model's weights to host memory. Each module's weights are loaded to a device for its forward.

    Args:
        model: Modified in place.
        execution_device: The device that runs the model. Default: the accelerator that the model is on, or the current
            accelerator, or the CPU without one.
        state_dict: Name of a weight → its value, also for weights on the meta device. Default: the model's values.
        offload_buffers, preload_module_classes, prefetch_bytes: See `dispatch_model`.

    Returns:
        The model.

    Raises:
        CheckpointError: A weight has no values, or is not in `state_dict`. The model is as before.
        ConfigurationError: The device is not on this machine, or `prefetch_bytes` is invalid.
    """
    device = _execution_device(model, execution_device)
    with restored_on_failure(model):
        remove_placement(model)
        places = WeightPlaces(model, {"": "cpu"}, state_dict, offload_buffers=offload_buffers)
        _add_hooks(places, device, {"cpu"}, None, preload_module_classes, prefetch_bytes)
    return model


def disk_offload(
    model: nn.Module,
    offload_dir: PathLike,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: list[str] | None = None,
    *,
    prefetch_bytes: int | None = None,
) -> nn.Module:
    """Offload a model's weights to the disk. Each module's weights are loaded to a device for its forward.

    Args:
        model: Modified in place. Weights on the meta device must be in `offload_dir`. Others are written there.
        offload_dir: A folder; created if it does not exist.
        execution_device: See `cpu_offload`.
        offload_buffers, preload_module_classes, prefetch_bytes: See `dispatch_model`.

    Returns:
        The model.

    Raises:
        CheckpointError: A weight is neither in the model nor in the folder, or cannot be written. The model and the
            files are as before.
        ConfigurationError: The device is not on this machine, or `prefetch_bytes` is invalid.
    """
    device = _execution_device(model, execution_device)
    with restored_on_failure(model):
        remove_placement(model)
        places = WeightPlaces(model, {"": "disk"}, folder=offload_dir, offload_buffers=offload_buffers)
        _add_hooks(places, device, {"disk"}, None, preload_module_classes, prefetch_bytes)
    return model


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: Device | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Store a model on the CPU until it is called. The call moves it to a device, where it stays until offloaded.

    Faster than `cpu_offload` for a model that runs in a loop. The device must have enough memory for the full model.

    Args:
        model: Modified in place.
        execution_device: The device that runs it. Default: the current accelerator, or the CPU.
        prev_module_hook: The hook that this function returned for the previous model of a pipeline. A call of this
            model moves the previous model back to the CPU.

    Returns:
        The model, and its hook: `offload()` moves the model to the CPU, `remove()` removes the hook.

    Raises:
        ConfigurationError: The device is not on this machine.
    """
    hook = CpuOffload(None if execution_device is None else checked_device(execution_device), prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)
