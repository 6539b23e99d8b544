"""Load a checkpoint into a model that may be empty or larger than the memory: mapped, checked first, assigned last."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from trainwright.bigmodels.dispatch.attach import innermost
from trainwright.bigmodels.dispatch.dispatch import dispatch_model
from trainwright.bigmodels.dispatch.moves import add_left_on_disk
from trainwright.bigmodels.dispatch.targets import (
    Target,
    assign,
    fill,
    find_targets,
    keep_away,
    lies_in_a_file,
    new_value,
)
from trainwright.bigmodels.dispatch.undo import restored_on_failure
from trainwright.bigmodels.maps.device_map import check_devices, resolve_device_map
from trainwright.bigmodels.weights.moving import Device, check_present, to_device
from trainwright.bigmodels.weights.stored_weights import StoredWeights, read_checkpoint
from trainwright.bigmodels.weights.weights_map import OffloadedWeightsLoader, offload_state_dict, read_offload_index
from trainwright.core.errors import CheckpointError, ConfigurationError, TrainwrightWarning
from trainwright.core.names.hidden_names import plain_name

PathLike = str | os.PathLike[str]

_SHOWN = 10  # names in a message


class LoadedKeys(NamedTuple):
    """Which names a checkpoint and a model do not share; both empty when they fit."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class _Options(NamedTuple):
    device_map: Mapping[str, Device] | None
    folder: PathLike | None
    dtype: torch.dtype | None
    offload_buffers: bool
    keep_in_fp32: tuple[str, ...]
    strict: bool = False
    will_run: bool = False  # the model is used next: every weight needs values


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: PathLike,
    device_map: Mapping[str, Device] | None = None,
    offload_folder: PathLike | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: list[str] | None = None,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> LoadedKeys:
    """Load weights into a model, which may be on the meta device, each part where a map says.

    Everything is checked before the first weight changes. On the CPU, what was on the meta device becomes a view of a
    safetensors file, read when it is first touched: the file may be replaced by another, and must not be written into;
    writing to a weight does not reach it. What `torch.save` wrote is read into memory. Parts on the disk stay in a
    safetensors file as they are; those of other files are written to `offload_folder`, once.

    Args:
        model: is changed. Weights that are on their device already are written over in place; hooks that keep some
            away keep the new ones.
        checkpoint: a file of weights, an index, or a folder; see `read_checkpoint`.
        device_map: module name → device, `"cpu"` or `"disk"`; unless given, weights stay where they are or are kept,
            and those on the meta device come to the CPU.
        offload_folder: for parts on the disk of a checkpoint that is not safetensors.
        dtype: floating-point weights and buffers become this; the model's own dtype unless given.
        offload_state_dict: is accepted and changes nothing: a state dict never stands in memory as a whole.
        offload_buffers: leave buffers on the disk too.
        keep_in_fp32_modules: names of modules (parts of dotted names) that stay float32 whatever `dtype`.
        strict: raise where the checkpoint and the model do not have the same names. Otherwise a warning names them,
            and weights of an empty model that have no values now: several loads may each bring a part.
        full_state_dict: False for a model of DTensors whose ranks each read their own shard; changes nothing for
            others, nor with a `device_map`.
        broadcast_from_rank0: only rank 0 reads the file; every rank must call this. With a `device_map` each reads it.

    Returns:
        The names that are missing in the checkpoint and those that the model has no use for.

    Raises:
        CheckpointError: the checkpoint is missing, damaged or cut short, or a shape or a kind of dtype differs; with
            `strict`, names differ. The model and the files are as before.
        ConfigurationError: an argument cannot be meant, or `offload_folder` is needed.
    """
    keep = tuple(keep_in_fp32_modules or ())
    options = _Options(device_map, offload_folder, to_dtype(dtype), offload_buffers, keep, strict)
    if _is_for_torch(model, options, full_state_dict, broadcast_from_rank0):
        return _load_distributed(model, Path(checkpoint), options, full_state_dict, broadcast_from_rank0)
    return _load(model, read_checkpoint(Path(checkpoint)), checkpoint, options)


def load_stored_weights(
    model: nn.Module,
    stored: StoredWeights,
    origin: PathLike,
    *,
    device_map: Mapping[str, Device],
    offload_folder: PathLike | None,
    dtype: torch.dtype | None,
    keep_in_fp32_modules: list[str] | None,
) -> LoadedKeys:
    """Load weights that are at hand by name, as `load_checkpoint_in_model` does; `origin` names them in messages."""
    options = _Options(device_map, offload_folder, dtype, False, tuple(keep_in_fp32_modules or ()))
    return _load(model, stored, origin, options)


def _load(model: nn.Module, stored: StoredWeights, checkpoint: PathLike, options: _Options) -> LoadedKeys:
    targets = find_targets(model)
    if options.device_map is not None:
        _check_map(targets, options.device_map)
    keys = _match(targets, stored)
    if options.will_run:
        _check_that_it_can_run(targets, checkpoint, options)
    _report(keys, _without_values(targets), checkpoint, options.strict)
    found = [target for target in targets if target.source is not None]
    for target in found:
        _decide(target, options)
    _compare(found, stored, checkpoint)
    on_disk = [target for target in found if target.device is None]
    left = _keep_on_disk(on_disk, stored, options, checkpoint)
    values = {id(target): new_value(target, stored) for target in found if target.device is not None}
    for target in found:
        if target.device is None:
            keep_away(model, target, left[target.names[0]], left.locate(target.names[0]))
        elif (value := values[id(target)]) is not None and target.kept:
            keep_away(model, target, value, None)
        elif value is not None:
            assign(model, target, value)
        else:
            fill(model, target, stored)
    if on_disk:
        add_left_on_disk(model, left)
    return keys


def to_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Return a dtype of torch, which may be given by its name.

    Raises:
        ConfigurationError: torch has none of that name, or it is none of weights.
    """
    if isinstance(dtype, str):
        found = getattr(torch, dtype.removeprefix("torch."), None)
        if not isinstance(found, torch.dtype):
            raise ConfigurationError(f"dtype={dtype!r} is none of torch's. Examples: 'float32', 'bfloat16', 'float16'.")
        dtype = found
    if dtype is not None and not (isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex)):
        raise ConfigurationError(
            f"dtype={dtype!r}, expected a floating-point dtype of torch, such as torch.bfloat16. Weights of fewer bits "
            "are what load_and_quantize_model makes."
        )
    return dtype


def _is_for_torch(model: nn.Module, options: _Options, full_state_dict: bool, broadcast_from_rank0: bool) -> bool:
    """Say whether torch has to cut or to send the weights. A map is for a model that each rank has as a whole."""
    if options.device_map is not None:
        return False
    return broadcast_from_rank0 or (not full_state_dict and any(map(_is_cut, model.parameters())))


def _is_cut(tensor: torch.Tensor) -> bool:
    return type(tensor).__module__.startswith("torch.distributed")


def _load_distributed(
    model: nn.Module, checkpoint: Path, options: _Options, full_state_dict: bool, broadcast_from_rank0: bool
) -> LoadedKeys:
    """Let torch cut the weights for a model of DTensors."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    targets = [target for target in find_targets(model) if target.tensor.is_floating_point()]
    for target in targets:
        _decide(target, options)
    other = [target for target in targets if target.dtype != target.tensor.dtype]
    if other:
        raise ConfigurationError(
            f"dtype={options.dtype}: {other[0].names[0]!r} and {len(other) - 1} other tensors are "
            f"{other[0].tensor.dtype}, and torch loads sharded or broadcast weights into what is there. Convert the "
            "model before it is sharded."
        )
    reads = not broadcast_from_rank0 or dist.get_rank() == 0
    stored: dict[str, Any] = dict(read_checkpoint(checkpoint)) if reads else {}
    how = StateDictOptions(
        full_state_dict=full_state_dict, broadcast_from_rank0=broadcast_from_rank0, strict=options.strict
    )
    result = set_model_state_dict(model, stored, options=how)
    return LoadedKeys(list(result.missing_keys), list(result.unexpected_keys))


def _check_map(targets: list[Target], device_map: Mapping[str, Device]) -> None:
    check_devices(device_map)
    lost = [name for target in targets for name in target.names if innermost(name, device_map) is None]
    if lost:
        raise ConfigurationError(
            f"the device map does not say where these go: {_list(lost)}. Add their modules, or '' for all the rest."
        )
    check_present(device_map)


def _check_that_it_can_run(targets: list[Target], checkpoint: PathLike, options: _Options) -> None:
    """Refuse what dispatching would refuse after weights have been written over."""
    left = [target for target in targets if target.source is None]
    if empty := _without_values(targets):
        raise CheckpointError(
            f"{checkpoint} does not hold {_list(empty)}, and the model has no values for them either: they are on the "
            "meta device. Name a checkpoint of this model, or give them values first."
        )
    for target in left:
        _decide(target, options)
    to_write = [target.names[0] for target in left if target.device is None and not lies_in_a_file(target)]
    if to_write and options.folder is None:
        raise ConfigurationError(
            f"the map puts {_list(to_write)} on the disk, and {checkpoint} does not hold them: pass offload_folder, a "
            "folder to write the model's own values to."
        )


def _without_values(targets: list[Target]) -> list[str]:
    """Return the names of what the checkpoint does not hold and the model has no values for."""
    return [
        target.names[0] for target in targets if target.source is None and target.tensor.is_meta and not target.kept
    ]


def _match(targets: list[Target], stored: StoredWeights) -> LoadedKeys:
    missing: list[str] = []
    known: set[str] = set()
    for target in targets:
        # A compiled part's names are written without what torch.compile adds to them.
        names = [each for name in target.names for each in dict.fromkeys((name, plain_name(name)))]
        known.update(names)
        present = [name for name in names if name in stored]
        # The last one, as load_state_dict: it copies each into the shared tensor, one after the other.
        target.source = present[-1] if present else None
        if not present:
            missing.append(target.names[0])
    return LoadedKeys(missing, [name for name in stored if name not in known])


def _report(keys: LoadedKeys, empty: list[str], checkpoint: PathLike, strict: bool) -> None:
    if not keys.missing_keys and not keys.unexpected_keys:
        return
    parts = []
    if keys.missing_keys:
        parts.append(f"missing in the checkpoint: {_list(keys.missing_keys)}")
    if keys.unexpected_keys:
        parts.append(f"not in the model: {_list(keys.unexpected_keys)}")
    message = f"{checkpoint} does not have the names of the model; {'; '.join(parts)}."
    if strict:
        raise CheckpointError(f"{message} Load it with strict=False if that is meant.")
    left = "What is missing keeps its values."
    if empty:
        left = (
            f"There are no values of {_list(empty)}, on the meta device: load them before the model is used, or it "
            "computes with whatever lies in memory."
        )
    warnings.warn(f"{message} {left}", TrainwrightWarning, stacklevel=4)


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(repr(name) for name in names[:_SHOWN]) + more


def _decide(target: Target, options: _Options) -> None:
    """Find a target's device and dtype."""
    target.dtype = target.tensor.dtype
    if target.tensor.is_floating_point() and options.dtype is not None:
        target.dtype = options.dtype
    if target.tensor.is_floating_point() and any(_within(name, options.keep_in_fp32) for name in target.names):
        target.dtype = torch.float32
    if options.device_map is None and target.kept:
        target.device = None if lies_in_a_file(target) else target.kept[0].value.device
        return
    if options.device_map is None:
        target.device = torch.device("cpu") if target.tensor.is_meta else target.tensor.device
        return
    devices = [options.device_map[innermost(name, options.device_map) or ""] for name in target.names]
    # A tensor of several modules is where the first of them is that is not on the disk.
    device = next((device for device in devices if device != "disk"), "disk")
    if device == "disk":
        target.device = torch.device("cpu") if target.is_buffer and not options.offload_buffers else None
    else:
        target.device = to_device(device)


def _within(name: str, modules: tuple[str, ...]) -> bool:
    return any(name == module or f".{module}." in f".{name}" for module in modules)


def _compare(targets: list[Target], stored: StoredWeights, checkpoint: PathLike) -> None:
    wrong: list[str] = []
    for target in targets:
        assert target.source is not None
        value = stored[target.source]
        if value.shape != target.tensor.shape:
            wrong.append(f"{target.source!r} has shape {tuple(value.shape)}, expected {tuple(target.tensor.shape)}")
        elif _kind(value) != _kind(target.tensor):
            wrong.append(f"{target.source!r} is {value.dtype}, expected {target.tensor.dtype}")
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise CheckpointError(f"{checkpoint} does not fit the model: {'; '.join(wrong[:_SHOWN])}{more}.")


def _kind(tensor: torch.Tensor) -> str:
    """Return what a dtype may not be turned into another of without saying so."""
    return "complex" if tensor.is_complex() else "floating" if tensor.is_floating_point() else "whole"


def _keep_on_disk(
    targets: list[Target], stored: StoredWeights, options: _Options, checkpoint: PathLike
) -> StoredWeights:
    """Return where the weights of parts on the disk lie: in place, or in files that they are written to now."""
    left = StoredWeights()
    loose: dict[str, torch.Tensor] = {}
    for target in targets:
        assert target.source is not None
        if stored.locate(target.source) is None:
            loose[target.names[0]] = stored[target.source]
    written = _write_once(loose, options.folder, checkpoint) if loose else None
    for target in targets:
        assert target.source is not None
        name = target.names[0]
        if written is not None and name in loose:
            left.add(name, *written.on_disk(name))
        else:
            left.add(name, stored[target.source], stored.locate(target.source))
        for other in target.names[1:]:
            left.add_alias(other, name)
    return left


def _write_once(
    tensors: Mapping[str, torch.Tensor], folder: PathLike | None, checkpoint: PathLike
) -> OffloadedWeightsLoader:
    """Write tensors that cannot be used in place, unless the folder holds them already from the same checkpoint."""
    if folder is None:
        raise ConfigurationError(
            f"parts of the model are on the disk, and {checkpoint} is not safetensors, which could be used in place: "
            "pass offload_folder, a folder to write them to."
        )
    origin = _origin(Path(checkpoint))
    index = read_offload_index(folder)
    if any(index.get(name, {}).get("origin") != origin for name in tensors):
        offload_state_dict(folder, tensors, origin=origin)
        index = read_offload_index(folder)
    return OffloadedWeightsLoader(save_folder=folder, index=index)


def _origin(checkpoint: Path) -> str:
    """Return what tells a checkpoint from another, or from itself after a change, without reading it."""
    files = [checkpoint] if checkpoint.is_file() else sorted(path for path in checkpoint.iterdir() if path.is_file())
    stats = [(path.name, path.stat()) for path in files]
    facts = " ".join(f"{name}:{stat.st_size}:{stat.st_mtime_ns}" for name, stat in stats)
    return f"{checkpoint.resolve()} {facts}"


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: PathLike,
    device_map: str | Mapping[str, Device] | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    no_split_module_classes: list[str] | None = None,
    offload_folder: PathLike | None = None,
    offload_buffers: bool = False,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
    *,
    keep_in_fp32_modules: list[str] | None = None,
    prefetch_bytes: int | None = None,
) -> nn.Module:
    """Load a checkpoint into a model that is probably empty, and spread it over the devices as a map says.

    Args:
        model: is changed.
        checkpoint: see `load_checkpoint_in_model`.
        device_map: module name → device, `"cpu"` or `"disk"`; or `"auto"`, `"balanced"`, `"balanced_low_0"`,
            `"sequential"` for one that `infer_auto_device_map` makes. None loads, and dispatches nothing.
        max_memory: for such a map: bytes by device, as numbers or `"10GiB"`; what is free unless given.
        no_split_module_classes: for such a map: names of classes that stay in one place.
        offload_folder: see `load_checkpoint_in_model`; not needed for safetensors.
        offload_buffers: offload buffers too.
        dtype: see `load_checkpoint_in_model`.
        offload_state_dict: is accepted and changes nothing.
        skip_keys: see `dispatch_model`.
        preload_module_classes: see `dispatch_model`.
        force_hooks: see `dispatch_model`.
        strict: see `load_checkpoint_in_model`.
        full_state_dict: see `load_checkpoint_in_model`.
        broadcast_from_rank0: see `load_checkpoint_in_model`.
        keep_in_fp32_modules: see `load_checkpoint_in_model`.
        prefetch_bytes: see `dispatch_model`.

    Returns:
        The model, with `hf_device_map` where it was dispatched.

    Raises:
        CheckpointError: see `load_checkpoint_in_model`; or weights of an empty model are not in the checkpoint.
        ConfigurationError: the map is not known, does not cover the model or names a device that is not here. The
            model and the files are as before.
    """
    places: Mapping[str, Device] | None
    if device_map is not None:
        places = resolve_device_map(
            model,
            device_map,
            max_memory=max_memory,
            no_split_module_classes=no_split_module_classes,
            dtype=dtype,
            offload_buffers=offload_buffers,
        )
    else:
        places = None
    keep = tuple(keep_in_fp32_modules or ())
    options = _Options(places, offload_folder, to_dtype(dtype), offload_buffers, keep, strict, will_run=True)
    with restored_on_failure(model):
        if _is_for_torch(model, options, full_state_dict, broadcast_from_rank0):
            _load_distributed(model, Path(checkpoint), options, full_state_dict, broadcast_from_rank0)
        else:
            _load(model, read_checkpoint(Path(checkpoint)), checkpoint, options)
        if places is None:
            return model
        return dispatch_model(
            model,
            places,
            offload_dir=offload_folder,
            offload_buffers=offload_buffers,
            skip_keys=skip_keys,
            preload_module_classes=preload_module_classes,
            force_hooks=force_hooks,
            prefetch_bytes=prefetch_bytes,
        )


def load_offloaded_weights(
    model: nn.Module, index: Mapping[str, Mapping[str, Any]] | None, offload_folder: PathLike
) -> None:
    """Put weights that were offloaded to a folder back into a model, on the CPU, mapped from their files.

    Args:
        model: is changed where the index names a parameter or buffer of it.
        index: the entries by name, as in the folder's `index.json`; nothing is done for an empty one.
        offload_folder: that `offload_state_dict` wrote.

    Raises:
        CheckpointError: a file is missing or too short.
    """
    if not index:
        return
    loader = OffloadedWeightsLoader(save_folder=offload_folder, index=index)
    for target in find_targets(model):
        name = next((name for name in target.names if name in index), None)
        if name is not None:
            assign(model, target, loader[name].to(target.tensor.dtype))
