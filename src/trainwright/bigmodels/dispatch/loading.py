"""Loading of a checkpoint into a model that may be on the meta device or larger than the memory.

The files are mapped, and all checks precede the first change of a weight.
"""

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
from trainwright.bigmodels.dispatch.dispatch import Source, checked_places, place_model
from trainwright.bigmodels.dispatch.moves import refuse_moves
from trainwright.bigmodels.dispatch.targets import (
    Target,
    assign,
    fill,
    find_targets,
    is_on_disk,
    new_value,
    replace_offloaded,
)
from trainwright.bigmodels.dispatch.undo import restored_on_failure
from trainwright.bigmodels.maps.device_map import check_devices, resolve_device_map
from trainwright.bigmodels.weights.moving import Device, check_available, to_device
from trainwright.bigmodels.weights.stored_weights import StoredWeights, read_checkpoint
from trainwright.bigmodels.weights.weights_map import OffloadedWeightsLoader, offload_state_dict, read_offload_index
from trainwright.core.errors import CheckpointError, ConfigurationError, TrainwrightWarning
from trainwright.core.names.hidden_names import plain_name

PathLike = str | os.PathLike[str]

_SHOWN = 10  # names in a message


class LoadedKeys(NamedTuple):
    """Names that exist only in the model or only in the checkpoint. Both lists are empty if all names match."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class LoadOptions(NamedTuple):
    """Arguments of `load_checkpoint_in_model`. `needs_values`: raise if a weight has no values after loading."""

    device_map: Mapping[str, Device] | None
    folder: PathLike | None
    dtype: torch.dtype | None
    offload_buffers: bool
    keep_in_fp32: tuple[str, ...]
    strict: bool = False
    needs_values: bool = False


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
    """Load weights into a model, which may be on the meta device, and move them to the devices of a device map.

    All checks precede the first change of a weight. Meta tensors that are loaded to the CPU from safetensors become
    views of the file, which are read on first access. The file may be replaced, but must not be modified. Writes to a
    weight do not change the file. Files of `torch.save` are read into memory. Weights that the map puts on the disk
    stay in their safetensors file. Those of other formats are first written to `offload_folder`.

    Args:
        model: The model, which is changed. Weights that are already on their device are overwritten in place. Offloaded
            weights are replaced, and stay offloaded.
        checkpoint: A file of weights, an index, or a folder. See `read_checkpoint`.
        device_map: Module name → device, `"cpu"` or `"disk"`. Default: None. Weights on the meta device are then loaded
            to the CPU, and other weights stay on their device.
        offload_folder: Folder for weights on the disk. Required if the checkpoint is not safetensors.
        dtype: Dtype of floating-point weights and buffers. Default: the dtype in the model.
        offload_state_dict: Accepted for compatibility; has no effect, because the state dict is never in memory at
            once.
        offload_buffers: Offload buffers to the disk too.
        keep_in_fp32_modules: Names of modules (parts of dotted names) that are loaded in float32.
        strict: Raise an error if names differ between checkpoint and model. By default, a warning lists the names, and
            the weights that have no values yet.
        full_state_dict: False if each rank reads its shard for a model with DTensors. No effect for other models and
            with a `device_map`.
        broadcast_from_rank0: Read the file only on rank 0. The call is then collective. No effect with a `device_map`.

    Returns:
        The names that are missing in the checkpoint, and the names that are not in the model.

    Raises:
        CheckpointError: The checkpoint is missing, damaged or truncated; a shape or a kind of dtype differs; or, with
            `strict`, names differ. The model and the files are as before.
        ConfigurationError: An argument is invalid, or `offload_folder` is required.
    """
    keep = tuple(keep_in_fp32_modules or ())
    options = LoadOptions(device_map, offload_folder, to_dtype(dtype), offload_buffers, keep, strict)
    if _is_for_torch(model, options, full_state_dict, broadcast_from_rank0):
        return _load_distributed(model, Path(checkpoint), options, full_state_dict, broadcast_from_rank0)
    return load_weights(model, read_checkpoint(Path(checkpoint)), checkpoint, options)


def load_weights(model: nn.Module, stored: StoredWeights, checkpoint: PathLike, options: LoadOptions) -> LoadedKeys:
    """Load the weights in `stored` into a model. `checkpoint` is only used in messages."""
    targets = find_targets(model)
    if options.device_map is not None:
        _check_map(targets, options.device_map)
    keys = _match(targets, stored)
    if options.needs_values:
        _check_has_values(targets, checkpoint, options)
    _report(keys, _without_values(targets), checkpoint, options.strict)
    found = [target for target in targets if target.source is not None]
    for target in found:
        _choose_device_and_dtype(target, options)
    _compare(found, stored, checkpoint)
    on_disk = [target for target in found if target.device is None]
    left = _offload_to_disk(on_disk, stored, options, checkpoint)
    values = {id(target): new_value(target, stored) for target in found if target.device is not None}
    for target in found:
        if target.device is None:
            replace_offloaded(model, target, left[target.names[0]], left.locate(target.names[0]))
        elif (value := values[id(target)]) is not None and target.offloaded:
            replace_offloaded(model, target, value, None)
        elif value is not None:
            assign(model, target, value)
        else:
            fill(model, target, stored)
    if on_disk:
        refuse_moves(model)
    return keys


def to_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Convert the name of a dtype to a `torch.dtype`.

    Raises:
        ConfigurationError: The dtype is unknown or is not a floating-point dtype.
    """
    if isinstance(dtype, str):
        found = getattr(torch, dtype.removeprefix("torch."), None)
        if not isinstance(found, torch.dtype):
            raise ConfigurationError(
                f"dtype={dtype!r} is not a dtype of torch. Examples: 'float32', 'bfloat16', 'float16'."
            )
        dtype = found
    if dtype is not None and not (isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex)):
        raise ConfigurationError(
            f"dtype={dtype!r}, expected a floating-point dtype of torch, such as torch.bfloat16. Use "
            "load_and_quantize_model for weights in fewer bits."
        )
    return dtype


def _is_for_torch(model: nn.Module, options: LoadOptions, full_state_dict: bool, broadcast_from_rank0: bool) -> bool:
    """Return whether torch has to shard or broadcast the weights. Models with a device map are never sharded."""
    if options.device_map is not None:
        return False
    kinds = {type(parameter).__module__ for parameter in model.parameters()}
    return broadcast_from_rank0 or (not full_state_dict and any(kind.startswith("torch.distributed") for kind in kinds))


def _load_distributed(
    model: nn.Module, checkpoint: Path, options: LoadOptions, full_state_dict: bool, broadcast_from_rank0: bool
) -> LoadedKeys:
    """Load weights with torch, which shards them for a model of DTensors."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    targets = [target for target in find_targets(model) if target.tensor.is_floating_point()]
    for target in targets:
        _choose_device_and_dtype(target, options)
    other = [target for target in targets if target.dtype != target.tensor.dtype]
    if other:
        raise ConfigurationError(
            f"dtype={options.dtype}: {other[0].names[0]!r} and {len(other) - 1} other tensors are "
            f"{other[0].tensor.dtype}, and torch loads sharded or broadcast weights into the existing tensors. Convert "
            "the model before it is sharded."
        )
    reads = not broadcast_from_rank0 or dist.get_rank() == 0
    stored: dict[str, Any] = dict(read_checkpoint(checkpoint)) if reads else {}
    torch_options = StateDictOptions(
        full_state_dict=full_state_dict, broadcast_from_rank0=broadcast_from_rank0, strict=options.strict
    )
    result = set_model_state_dict(model, stored, options=torch_options)
    return LoadedKeys(list(result.missing_keys), list(result.unexpected_keys))


def _check_map(targets: list[Target], device_map: Mapping[str, Device]) -> None:
    check_devices(device_map)
    lost = [name for target in targets for name in target.names if innermost(name, device_map) is None]
    if lost:
        raise ConfigurationError(
            f"the device map does not cover these tensors: {_list(lost)}. Add their modules, or '' for all the rest."
        )
    check_available(device_map)


def _check_has_values(targets: list[Target], checkpoint: PathLike, options: LoadOptions) -> None:
    """Raise if `dispatch_model` would raise because of missing values, before weights are overwritten."""
    left = [target for target in targets if target.source is None]
    if empty := _without_values(targets):
        raise CheckpointError(
            f"{checkpoint} does not contain {_list(empty)}, and the model has no values for them: they are on the meta "
            "device. Load a checkpoint that contains them, or initialize them first."
        )
    for target in left:
        _choose_device_and_dtype(target, options)
    to_write = [target.names[0] for target in left if target.device is None and not is_on_disk(target)]
    if to_write and options.folder is None:
        raise ConfigurationError(
            f"the device map puts {_list(to_write)} on the disk, and {checkpoint} does not contain them. Pass "
            "offload_folder, a folder to write the model's own values to."
        )


def _without_values(targets: list[Target]) -> list[str]:
    """Return the names of tensors that have values neither in the checkpoint nor in the model."""
    return [
        target.names[0]
        for target in targets
        if target.source is None and target.tensor.is_meta and not target.offloaded
    ]


def _match(targets: list[Target], stored: StoredWeights) -> LoadedKeys:
    missing: list[str] = []
    known: set[str] = set()
    for target in targets:
        # Checkpoints do not contain the prefixes that torch.compile adds to names.
        names = [each for name in target.names for each in dict.fromkeys((name, plain_name(name)))]
        known.update(names)
        present = [name for name in names if name in stored]
        # The last name, as in load_state_dict, which copies the value of each name into the shared tensor.
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
        raise CheckpointError(f"{message} Pass strict=False to load the others.")
    consequence = "Missing weights keep their values."
    if empty:
        consequence = (
            f"There are no values of {_list(empty)}, on the meta device: load them before the model is used, or it "
            "computes with uninitialized memory."
        )
    warnings.warn(f"{message} {consequence}", TrainwrightWarning, stacklevel=4)


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(repr(name) for name in names[:_SHOWN]) + more


def _choose_device_and_dtype(target: Target, options: LoadOptions) -> None:
    target.dtype = target.tensor.dtype
    if target.tensor.is_floating_point() and options.dtype is not None:
        target.dtype = options.dtype
    if target.tensor.is_floating_point() and any(_within(name, options.keep_in_fp32) for name in target.names):
        target.dtype = torch.float32
    if options.device_map is None and target.offloaded:
        target.device = None if is_on_disk(target) else target.offloaded[0].value.device
        return
    if options.device_map is None:
        target.device = torch.device("cpu") if target.tensor.is_meta else target.tensor.device
        return
    devices = [options.device_map[innermost(name, options.device_map) or ""] for name in target.names]
    # A shared tensor goes to the device of its first module that is not on the disk.
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
        raise CheckpointError(f"{checkpoint} does not match the model: {'; '.join(wrong[:_SHOWN])}{more}.")


def _kind(tensor: torch.Tensor) -> str:
    """Return the kind of a tensor's dtype. Loading converts only between dtypes of one kind."""
    return "complex" if tensor.is_complex() else "floating" if tensor.is_floating_point() else "integer"


def _offload_to_disk(
    targets: list[Target], stored: StoredWeights, options: LoadOptions, checkpoint: PathLike
) -> StoredWeights:
    """Return the weights on the disk. Weights that are not in safetensors files are written to files first."""
    left = StoredWeights()
    to_write: dict[str, torch.Tensor] = {}
    for target in targets:
        assert target.source is not None
        if stored.locate(target.source) is None:
            to_write[target.names[0]] = stored[target.source]
    written = _write_once(to_write, options.folder, checkpoint) if to_write else None
    for target in targets:
        assert target.source is not None
        name = target.names[0]
        if written is not None and name in to_write:
            left.add(name, *written.on_disk(name))
        else:
            left.add(name, stored[target.source], stored.locate(target.source))
        for other in target.names[1:]:
            left.add_alias(other, name)
    return left


def _write_once(
    tensors: Mapping[str, torch.Tensor], folder: PathLike | None, checkpoint: PathLike
) -> OffloadedWeightsLoader:
    """Write tensors to the folder, unless it already contains them from the same checkpoint."""
    if folder is None:
        raise ConfigurationError(
            f"the device map puts parts of the model on the disk, and {checkpoint} is not safetensors, which would be "
            "used directly. Pass offload_folder, a folder to write these parts to."
        )
    origin = _origin(Path(checkpoint))
    index = read_offload_index(folder)
    if any(index.get(name, {}).get("origin") != origin for name in tensors):
        offload_state_dict(folder, tensors, origin=origin)
        index = read_offload_index(folder)
    return OffloadedWeightsLoader(save_folder=folder, index=index)


def _origin(checkpoint: Path) -> str:
    """Identify the content of a checkpoint by the names, sizes and times of its files."""
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
    """Load a checkpoint into a model, which is usually on the meta device, and dispatch the model over devices.

    Args:
        model: The model, which is changed.
        checkpoint: See `load_checkpoint_in_model`.
        device_map: Module name → device, `"cpu"` or `"disk"`. `"auto"`, `"balanced"`, `"balanced_low_0"` and
            `"sequential"` compute a map with `infer_auto_device_map`. None loads the checkpoint without dispatching the
            model.
        max_memory: Bytes per device for a computed map, as numbers or `"10GiB"`. Default: the free memory.
        no_split_module_classes: Names of classes that a computed map does not split.
        offload_folder: See `load_checkpoint_in_model`. Not needed for safetensors.
        offload_buffers: Offload buffers too.
        dtype, offload_state_dict, strict, full_state_dict, broadcast_from_rank0, keep_in_fp32_modules: See
            `load_checkpoint_in_model`.
        skip_keys, preload_module_classes, force_hooks, prefetch_bytes: See `dispatch_model`.

    Returns:
        The model. If it was dispatched, it has the attribute `hf_device_map`.

    Raises:
        CheckpointError: `load_checkpoint_in_model` raises it, or a weight has values neither in the checkpoint nor in
            the model.
        ConfigurationError: `device_map` is an unknown word, does not cover the model, or contains a device that is not
            on this machine. The model and the files are as before.
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
    options = LoadOptions(places, offload_folder, to_dtype(dtype), offload_buffers, keep, strict, needs_values=True)
    with restored_on_failure(model):
        if _is_for_torch(model, options, full_state_dict, broadcast_from_rank0):
            _load_distributed(model, Path(checkpoint), options, full_state_dict, broadcast_from_rank0)
        else:
            load_weights(model, read_checkpoint(Path(checkpoint)), checkpoint, options)
        if places is not None:
            place_model(
                model,
                checked_places(model, places, offload_buffers, strict=False),
                Source(folder=offload_folder, offload_buffers=offload_buffers),
                skip_keys=skip_keys,
                preload_module_classes=preload_module_classes,
                force_hooks=force_hooks,
                prefetch_bytes=prefetch_bytes,
            )
    return model


def load_offloaded_weights(
    model: nn.Module, index: Mapping[str, Mapping[str, Any]] | None, offload_folder: PathLike
) -> None:
    """Load the weights in `index` from an offload folder into a model, on the CPU and mapped from their files.

    Raises:
        CheckpointError: A file is missing or too short.
    """
    if not index:
        return
    loader = OffloadedWeightsLoader(save_folder=offload_folder, index=index)
    for target in find_targets(model):
        name = next((name for name in target.names if name in index), None)
        if name is not None:
            assign(model, target, loader[name].to(target.tensor.dtype))
