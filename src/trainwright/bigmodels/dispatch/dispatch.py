"""Spread a model over devices, the CPU's memory and the disk, so that it can be called as if it lay in one place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from trainwright.bigmodels.dispatch.align import AlignDevicesHook, has_offloaded_params
from trainwright.bigmodels.dispatch.attach import (
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    innermost,
)
from trainwright.bigmodels.dispatch.model_hooks import CpuOffload, UserCpuOffloadHook, add_hook_to_module
from trainwright.bigmodels.dispatch.moves import left_on_disk, refuse_moves
from trainwright.bigmodels.dispatch.placement import check_first_forward, restored_on_failure, take_back
from trainwright.bigmodels.maps.device_map import check_device_map, resolve_device_map
from trainwright.bigmodels.weights.filling import fill_empty, with_tied_names
from trainwright.bigmodels.weights.moving import Device, check_present, default_device, present_device, to_device
from trainwright.bigmodels.weights.stored_weights import StoredWeights
from trainwright.bigmodels.weights.weights_map import (
    OffloadedWeightsLoader,
    offload_state_dict,
    read_offload_index,
)
from trainwright.core.errors import CheckpointError, ConfigurationError
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
    """Place each part of a model where a map says, and make the model run across these places.

    Args:
        model: is changed. One that is dispatched or offloaded is placed anew, its weights taken from where they are.
            Parts on the meta device must be on the disk: left there by a load, in `offload_dir`, or in `state_dict`.
        device_map: module name → device, `"cpu"` or `"disk"`; covers the model, except for the parameters in its
            `_no_placement_params`, which stay where they are. `{"": "disk"}` is fine. Or
            `"auto"` (which None means too), `"balanced"`, `"balanced_low_0"`, `"sequential"`: a map by what is free
            now, with the classes in the model's `_no_split_modules` kept whole.
        main_device: where parts on the CPU or the disk run, and where outputs go that no input says a place for; the
            first accelerator of the map unless told, else the CPU.
        state_dict: the values of what is offloaded, and of what is on the meta device; the model's own unless given.
        offload_dir: a folder that parts on the disk are written to, unless they lie on the disk already: in a
            safetensors checkpoint that was loaded, in an earlier call's folder, or in this folder.
        offload_index: where they lie, in place of the folder's `index.json`.
        offload_buffers: offload buffers too.
        skip_keys: names of arguments that are not moved between devices, such as a cache's.
        preload_module_classes: see `attach_align_device_hook`.
        force_hooks: put hooks on even where the whole model is on one device.
        strict: raise where the map has a name that the model has not. Otherwise a warning names it.
        prefetch_bytes: how much may be read ahead of its use, 0 for nothing; see `Prefetcher`.

    Returns:
        The model, with `hf_device_map`. A failed call leaves weights and files as they were.

    Raises:
        ConfigurationError: the map does not cover the model, a device is none or not here, or a folder is needed and
            not given.
        CheckpointError: offloaded weights are not found or cannot be written.
    """
    places = _places(model, device_map, offload_buffers, strict)
    state_dict = None if state_dict is None else with_tied_names(model, state_dict)
    devices = set(places.values())
    with restored_on_failure(model):
        take_back(model)
        if len(devices) == 1 and "disk" not in devices and not force_hooks:
            return _on_one_device(model, places, state_dict, offload_dir, offload_index)
        main = _main_device(list(places.values()), main_device)
        _fill_staying(model, places, _away(main), offload_buffers, state_dict, offload_dir, offload_index)
        _fill_kept(model, places, _away(main) - {"disk"}, state_dict)
        weights = _weights_away(model, places, main, state_dict, offload_dir, offload_index, offload_buffers)
        runs_on = {name: main if device in ("cpu", "disk") else to_device(device) for name, device in places.items()}
        runs_on.setdefault("", main)
        _separate_tied(model, places, runs_on)
        away = _away(main)
        attach_align_device_hook_on_blocks(
            model,
            execution_device=runs_on,
            offload={name: device in away for name, device in places.items()},
            weights_map=weights,
            offload_buffers=offload_buffers,
            skip_keys=skip_keys,
            preload_module_classes=preload_module_classes,
            prefetcher=Prefetcher(prefetch_bytes),
        )
        return _dispatched(model, places)


def _places(
    model: nn.Module, device_map: str | Mapping[str, Device] | None, offload_buffers: bool, strict: bool
) -> dict[str, Device]:
    """Return a map that covers the model and whose devices are here."""
    if device_map is None or isinstance(device_map, str):
        kept_whole: Any = getattr(model, "_no_split_modules", None)
        return resolve_device_map(
            model,
            "auto" if device_map is None else device_map,
            no_split_module_classes=list(kept_whole or ()),
            offload_buffers=offload_buffers,
        )
    unplaced: Any = getattr(model, "_no_placement_params", None)  # of transformers: they stay where they are
    ends = tuple(unplaced or ())
    staying = {name: "cpu" for name, _ in model.named_parameters() if ends and name.endswith(ends)}
    check_device_map(model, staying | dict(device_map), strict=strict)
    check_present(device_map)
    return dict(device_map)


def _away(main: torch.device) -> set[str]:
    """Return the places from which weights have to be brought where they are needed."""
    return {"disk"} if main.type in ("cpu", "mps") else {"cpu", "disk"}


def _weights_away(
    model: nn.Module,
    device_map: Mapping[str, Device],
    main: torch.device,
    state_dict: Mapping[str, torch.Tensor] | None,
    folder: PathLike | None,
    index: Mapping[str, Mapping[str, Any]] | None,
    with_buffers: bool,
) -> StoredWeights:
    """Return the weights that are not where they are needed, after writing those that belong to the disk."""
    weights = StoredWeights()
    values: Mapping[str, torch.Tensor] = model.state_dict() if state_dict is None else state_dict
    for name, tensor in _in_places(values, device_map, _away(main) - {"disk"}).items():
        weights.add(name, _on_host(name, tensor))
    _add_from_disk(weights, model, device_map, values, folder, index, with_buffers)
    return weights


def _fill_staying(
    model: nn.Module,
    device_map: Mapping[str, Device],
    away: set[str],
    with_buffers: bool,
    state_dict: Mapping[str, torch.Tensor] | None,
    folder: PathLike | None = None,
    index: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Give empty tensors that are not offloaded their values, from the state dict or the folder."""
    buffers = dict(model.named_buffers(remove_duplicate=False))
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **buffers}
    offloaded = _in_places(tensors, device_map, away)
    lasting = model.state_dict().keys() if with_buffers else ()
    staying = [name for name in tensors if name not in offloaded or (name in buffers and name not in lasting)]
    virtual = _in_places(tensors, device_map, {"meta"})
    stored = OffloadedWeightsLoader(left_on_disk(model), folder, index)
    fill_empty(model, [name for name in staying if name not in virtual], state_dict or {}, stored)


def _fill_kept(
    model: nn.Module, device_map: Mapping[str, Device], places: set[str], state_dict: Mapping[str, torch.Tensor] | None
) -> None:
    """Give empty weights that are kept in some places what was left of them on the disk, if it was."""
    left = left_on_disk(model)
    names = [name for name in _in_places(model.state_dict(), device_map, places) if name in left]
    fill_empty(model, names, state_dict or {}, left)


def _on_one_device(
    model: nn.Module,
    device_map: Mapping[str, Device],
    state_dict: Mapping[str, torch.Tensor] | None,
    folder: PathLike | None,
    index: Mapping[str, Mapping[str, Any]] | None,
) -> nn.Module:
    if state_dict is not None:
        _fill_staying(model, device_map, set(), False, state_dict, folder, index)
    elif torch.device(next(iter(device_map.values()))).type != "meta":
        stored = OffloadedWeightsLoader(left_on_disk(model), folder, index)
        fill_empty(model, [name for name in model.state_dict() if name in stored], stored)
    empty = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    if empty and torch.device(next(iter(device_map.values()))).type != "meta":
        raise ConfigurationError(
            f"{len(empty)} tensors of the model have no values, {empty[0]!r} first. Load a checkpoint before it is "
            "dispatched, or use load_checkpoint_and_dispatch."
        )
    model.to(to_device(next(iter(device_map.values()))))
    model.hf_device_map = dict(device_map)  # type: ignore[assignment]  # modules type attributes as tensors
    return model


def _dispatched(model: nn.Module, device_map: Mapping[str, Device]) -> nn.Module:
    model.hf_device_map = dict(device_map)  # type: ignore[assignment]  # modules type attributes as tensors
    if any(has_offloaded_params(module) for module in model.modules()):
        refuse_moves(model)
        check_first_forward(model)
    return model


def _main_device(devices: list[Device], asked: Device | None) -> torch.device:
    if asked is not None:
        return present_device(asked)
    first = next((device for device in devices if device not in ("cpu", "disk")), None)
    if first is not None:
        return to_device(first)
    return default_device() if set(devices) == {"disk"} else torch.device("cpu")


def _on_host(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        raise CheckpointError(
            f"{name!r} is to be kept on the CPU and has no values: it is on the meta device. Load a checkpoint first, "
            "or pass a state_dict that holds it."
        )
    return tensor.detach().to("cpu")


def _add_from_disk(
    weights: StoredWeights,
    model: nn.Module,
    device_map: Mapping[str, Device],
    values: Mapping[str, torch.Tensor],
    folder: PathLike | None,
    index: Mapping[str, Mapping[str, Any]] | None,
    with_buffers: bool,
) -> None:
    """Add the weights of modules that are on the disk, after writing those that are not there yet."""
    wanted = _offloaded_values(model, device_map, values, with_buffers)
    for name, tensor in _shared_with_others(model, device_map, wanted).items():
        weights.add(name, tensor)  # in memory anyway
        del wanted[name]
    if not wanted:
        return
    left = left_on_disk(model)
    folder_index = index if index is not None or folder is None else read_offload_index(folder)
    stored = OffloadedWeightsLoader(left, folder, folder_index or {})
    new = {name: tensor for name, tensor in wanted.items() if not tensor.is_meta}
    missing = [name for name in wanted if name not in new and name not in stored]
    if missing:
        raise CheckpointError(
            f"{len(missing)} offloaded weights are neither in the model nor on the disk: {', '.join(missing[:5])}"
            f"{' …' if len(missing) > 5 else ''}. Load a checkpoint first, or name their folder as offload_dir."
        )
    if new and folder is None:
        raise ConfigurationError(
            f"the map puts {next(iter(new))!r} and {len(new) - 1} other weights on the disk, where they are not yet: "
            "pass offload_dir, a folder to write them to."
        )
    aliases = _aliases(new)
    if new and folder is not None:
        offload_state_dict(folder, {name: tensor for name, tensor in new.items() if name not in aliases})
        stored = OffloadedWeightsLoader(left, folder, {**(folder_index or {}), **read_offload_index(folder)})
    for name in wanted:
        if name not in aliases:
            if name in new:
                weights.add(name, *stored.on_disk(name))  # whatever a checkpoint loaded before says about it
            else:
                weights.add(name, stored[name], stored.locate(name))
    for name, same in aliases.items():
        weights.add_alias(name, same)


def _offloaded_values(
    model: nn.Module, device_map: Mapping[str, Device], values: Mapping[str, torch.Tensor], with_buffers: bool
) -> dict[str, torch.Tensor]:
    buffers = set() if with_buffers else {name for name, _ in model.named_buffers(remove_duplicate=False)}
    names = _in_places(model.state_dict(), device_map, {"disk"})
    return {name: values.get(name, tensor) for name, tensor in names.items() if name not in buffers}


def _shared_with_others(
    model: nn.Module, device_map: Mapping[str, Device], wanted: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return those of the wanted tensors that a module which is not on the disk has too."""
    everything = dict(model.named_parameters(remove_duplicate=False))
    inside = _in_places(everything, device_map, {"disk"})
    outside = {id(tensor) for name, tensor in everything.items() if name not in inside and not tensor.is_meta}
    return {name: tensor.detach() for name, tensor in inside.items() if name in wanted and id(tensor) in outside}


def _aliases(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the names of tensors that are the same memory as one before, with the name of that one."""
    first: dict[tuple[Any, ...], str] = {}
    found: dict[str, str] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            same = first.setdefault((tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()), name)
            if same != name:
                found[name] = same
    return found


def _separate_tied(model: nn.Module, device_map: Mapping[str, Device], runs_on: Mapping[str, torch.device]) -> None:
    """Give modules on different devices a parameter each where they share one: it cannot be in two places."""
    places: dict[int, torch.device] = {}
    for path, module in model.named_modules():
        block = innermost(path, device_map)
        if block is None or device_map[block] in ("cpu", "disk"):
            continue
        for name, parameter in module._parameters.items():
            if parameter is not None and places.setdefault(id(parameter), runs_on[block]) != runs_on[block]:
                module._parameters[name] = nn.Parameter(parameter.detach(), parameter.requires_grad)


def _in_places(
    tensors: Mapping[str, torch.Tensor], device_map: Mapping[str, Device], places: set[str]
) -> dict[str, torch.Tensor]:
    """Return the tensors that the map puts into one of some places."""
    found = {}
    for name, tensor in tensors.items():
        entry = innermost(name, device_map)
        if entry is not None and device_map[entry] in places:
            found[name] = tensor
    return found


def _execution_device(model: nn.Module, asked: Device | None) -> torch.device:
    if asked is not None:
        return present_device(asked)
    first = next(model.parameters(), None)
    return default_device() if first is None or first.device.type in ("cpu", "meta") else first.device


def cpu_offload(
    model: nn.Module,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    preload_module_classes: list[str] | None = None,
    *,
    prefetch_bytes: int | None = None,
) -> nn.Module:
    """Keep a model's weights in the CPU's memory, and bring each module's to a device for the time of its forward.

    Args:
        model: is changed.
        execution_device: where it runs; unless told, the accelerator that it is on, or the present one.
        offload_buffers: offload buffers too.
        state_dict: the weights, on the CPU, and buffers that are on the meta device; the model's own unless given.
        preload_module_classes: see `attach_align_device_hook`.
        prefetch_bytes: how much may be brought ahead of its use, 0 for nothing; see `Prefetcher`.

    Returns:
        The model.

    Raises:
        CheckpointError: a weight has no values, or `state_dict` lacks it. The model is as before.
        ConfigurationError: the device is not here.
    """
    device = _execution_device(model, execution_device)
    state_dict = None if state_dict is None else with_tied_names(model, state_dict)
    weights = StoredWeights()
    with restored_on_failure(model):
        take_back(model)
        _fill_kept(model, {"": "cpu"}, {"cpu"}, state_dict)
        for name, tensor in (model.state_dict() if state_dict is None else state_dict).items():
            weights.add(name, _on_host(name, tensor))
        _fill_staying(model, {"": "cpu"}, {"cpu"}, offload_buffers, state_dict)
        return _offloaded(model, weights, device, offload_buffers, preload_module_classes, prefetch_bytes)


def disk_offload(
    model: nn.Module,
    offload_dir: PathLike,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: list[str] | None = None,
    *,
    prefetch_bytes: int | None = None,
) -> nn.Module:
    """Keep a model's weights on the disk, and bring each module's to a device for the time of its forward.

    Args:
        model: is changed. Weights on the meta device must lie in `offload_dir` already; others are written there.
        offload_dir: a folder; made where it is missing.
        execution_device: see `cpu_offload`.
        offload_buffers: offload buffers too.
        preload_module_classes: see `attach_align_device_hook`.
        prefetch_bytes: how much may be read ahead of its use, 0 for nothing; see `Prefetcher`.

    Returns:
        The model.

    Raises:
        CheckpointError: a weight is neither in the model nor in the folder, or it cannot be written. The model and
            the files are as before.
        ConfigurationError: the device is not here.
    """
    device = _execution_device(model, execution_device)
    weights = StoredWeights()
    with restored_on_failure(model):
        take_back(model)
        _fill_staying(model, {"": "disk"}, {"disk"}, offload_buffers, None, offload_dir)
        _add_from_disk(weights, model, {"": "disk"}, model.state_dict(), offload_dir, None, offload_buffers)
        return _offloaded(model, weights, device, offload_buffers, preload_module_classes, prefetch_bytes)


def _offloaded(
    model: nn.Module,
    weights: StoredWeights,
    device: torch.device,
    offload_buffers: bool,
    preload: list[str] | None,
    prefetch_bytes: int | None,
) -> nn.Module:
    add_hook_to_module(model, AlignDevicesHook(device, io_same_device=True), append=True)
    attach_align_device_hook(
        model,
        execution_device=device,
        offload=True,
        weights_map=weights,
        offload_buffers=offload_buffers,
        preload_module_classes=preload,
        prefetcher=Prefetcher(prefetch_bytes),
    )
    refuse_moves(model)
    check_first_forward(model)
    return model


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: Device | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keep a whole model on the CPU, move it to a device when it is called, and leave it there until it is told.

    Faster than `cpu_offload` where a model runs in a loop, and needs room for all of it.

    Args:
        model: is changed.
        execution_device: where it runs; the present accelerator unless told, or the CPU where there is none.
        prev_module_hook: what this function returned for the model that runs before this one in a pipeline; calling
            this model sends that one back to the CPU.

    Returns:
        The model, and the hook whose `offload()` sends it to the CPU and whose `remove()` ends all this.

    Raises:
        ConfigurationError: the device is not here.
    """
    hook = CpuOffload(None if execution_device is None else present_device(execution_device), prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)
