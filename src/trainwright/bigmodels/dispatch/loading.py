"""Loading of a checkpoint into a model that may be on the meta device or larger than the memory.

The files are mapped, and all checks precede the first change of a weight.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainwright.bigmodels.dispatch.checkpoint_names import LoadedKeys
from trainwright.bigmodels.dispatch.dispatch import attach_places
from trainwright.bigmodels.dispatch.undo import remove_placement, restored_on_failure
from trainwright.bigmodels.dispatch.weight_places import WeightPlaces
from trainwright.bigmodels.maps.device_map import check_device_map, resolve_device_map
from trainwright.bigmodels.weights.moving import Device, check_available
from trainwright.bigmodels.weights.placeholders import like
from trainwright.bigmodels.weights.stored_weights import read_checkpoint
from trainwright.bigmodels.weights.weights_map import OffloadedWeightsLoader
from trainwright.core.errors import ConfigurationError

PathLike = str | os.PathLike[str]


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
        offload_state_dict: Accepted without effect: the state dict is never in memory as a whole.
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
        ConfigurationError: An argument is invalid, `device_map` does not cover the model or has a device that is not on
            this machine, or `offload_folder` is required. For sharded models, `dtype` differs from the model's.
    """
    final_dtype = to_dtype(dtype)
    keep = keep_in_fp32_modules or ()
    if device_map is None and _is_for_torch(model, full_state_dict, broadcast_from_rank0):
        return _load_distributed(
            model, Path(checkpoint), final_dtype, keep, strict, full_state_dict, broadcast_from_rank0
        )
    if device_map is not None:
        check_device_map(model, device_map)
        check_available(device_map)
    places = WeightPlaces(model, device_map, folder=offload_folder, offload_buffers=offload_buffers)
    stored = read_checkpoint(Path(checkpoint))
    return places.fill(stored, checkpoint, dtype=final_dtype, keep_in_fp32=keep, strict=strict)


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


def _is_for_torch(model: nn.Module, full_state_dict: bool, broadcast_from_rank0: bool) -> bool:
    """Return whether torch has to shard or broadcast the weights."""
    if broadcast_from_rank0:
        return True
    modules = {type(parameter).__module__ for parameter in model.parameters()}
    has_dtensors = any(module.startswith("torch.distributed") for module in modules)
    return has_dtensors and not full_state_dict


def _load_distributed(
    model: nn.Module,
    checkpoint: Path,
    dtype: torch.dtype | None,
    keep_in_fp32: Collection[str],
    strict: bool,
    full_state_dict: bool,
    broadcast_from_rank0: bool,
) -> LoadedKeys:
    """Load weights with torch, which shards them for a model of DTensors. Collective."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    weights = WeightPlaces(model).saved
    for weight in weights:
        weight.choose_dtype(dtype, keep_in_fp32)
    converted = [weight for weight in weights if weight.dtype != weight.tensor.dtype]
    if converted:
        first = converted[0]
        raise ConfigurationError(
            f"dtype={dtype}: {first.names[0]!r} and {len(converted) - 1} other tensors are {first.tensor.dtype}, "
            "and torch loads sharded or broadcast weights into the existing tensors. Convert the model before it is "
            "sharded."
        )
    reads = not broadcast_from_rank0 or dist.get_rank() == 0
    stored: dict[str, Any] = dict(read_checkpoint(checkpoint)) if reads else {}
    torch_options = StateDictOptions(
        full_state_dict=full_state_dict, broadcast_from_rank0=broadcast_from_rank0, strict=strict
    )
    result = set_model_state_dict(model, stored, options=torch_options)
    return LoadedKeys(list(result.missing_keys), list(result.unexpected_keys))


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
            on this machine; or another argument is invalid. The model and the files are as before.
    """
    final_dtype = to_dtype(dtype)
    resolved: Mapping[str, Device] | None = None
    if device_map is not None:
        resolved = resolve_device_map(
            model,
            device_map,
            max_memory=max_memory,
            no_split_module_classes=no_split_module_classes,
            dtype=dtype,
            offload_buffers=offload_buffers,
        )
        check_available(resolved)
    keep = keep_in_fp32_modules or ()
    with restored_on_failure(model):
        if resolved is None and _is_for_torch(model, full_state_dict, broadcast_from_rank0):
            _load_distributed(model, Path(checkpoint), final_dtype, keep, strict, full_state_dict, broadcast_from_rank0)
            return model
        if resolved is not None:
            remove_placement(model)  # before the places are computed from the model's tensors and hooks
        places = WeightPlaces(model, resolved, folder=offload_folder, offload_buffers=offload_buffers)
        places.fill(
            read_checkpoint(Path(checkpoint)),
            checkpoint,
            dtype=final_dtype,
            keep_in_fp32=keep,
            strict=strict,
            needs_values=True,
        )
        if resolved is not None:
            attach_places(
                places,
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

    Args:
        model: Modified in place. Weights that are not in `index` are not changed.
        index: The index of the folder. None or an empty index loads nothing.
        offload_folder: A folder that `offload_state_dict` wrote.

    Raises:
        CheckpointError: A file is missing or too short.
    """
    if not index:
        return
    loader = OffloadedWeightsLoader(save_folder=offload_folder, index=index)
    places = WeightPlaces(model)
    for weight in places.saved:
        name = next((name for name in weight.names if name in index), None)
        if name is not None:
            places.assign(weight, like(weight.tensor, loader[name].to(weight.tensor.dtype)))
