"""Move or replace a single tensor of a model, and load the tensors of a file to devices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from trainwright.bigmodels.dispatch.align import TiedParams
from trainwright.bigmodels.dispatch.attach import innermost
from trainwright.bigmodels.dispatch.loading import PathLike, to_dtype
from trainwright.bigmodels.maps.device_map import check_devices
from trainwright.bigmodels.weights.moving import Device, check_available, checked_device
from trainwright.bigmodels.weights.placeholders import like
from trainwright.bigmodels.weights.slots import put
from trainwright.bigmodels.weights.stored_weights import StoredWeights
from trainwright.core.errors import ConfigurationError, nearest
from trainwright.core.host.memory import clear_device_cache


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: Device,
    value: torch.Tensor | None = None,
    dtype: str | torch.dtype | None = None,
    fp16_statistics: torch.Tensor | None = None,
    tied_params_map: TiedParams | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Move a parameter or buffer to a device, optionally with new values or another dtype.

    The new tensor has the same class and attributes. Other modules that share the tensor keep the old tensor. Tie them
    again with `retie_parameters`.

    Args:
        module: The module, which is changed.
        tensor_name: Dotted name of a parameter or buffer.
        device: The target.
        value: New values, with the tensor's shape. Default: the current values.
        dtype: The new dtype. Default: the current dtype.
        fp16_statistics: Row scales of an int8 weight of bitsandbytes, which become its attribute `SCB`.
        tied_params_map: Address of a weight's memory (`data_ptr()`) → copies of the weight by device. An existing copy
            is used. A new copy is added if the map has an entry for the weight.
        non_blocking: Do not wait for the copy.
        clear_cache: Release the accelerator's cached memory afterwards.

    Raises:
        ConfigurationError: The module has no tensor of this name, the device is not on this machine, the shape differs,
            the dtype is not a floating-point dtype, or a meta tensor is moved without `value`. The module is as before.
    """
    former = _find_tensor(module, tensor_name)
    if former is None:
        known = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
        raise ConfigurationError(f"{type(module).__name__} has no tensor {tensor_name!r}.{nearest(tensor_name, known)}")
    target = checked_device(device)
    if value is None and former.is_meta and target.type != "meta":
        raise ConfigurationError(f"{tensor_name!r} is on the meta device. Pass its value on {target}.")
    if value is not None and value.shape != former.shape:
        raise ConfigurationError(
            f"{tensor_name!r} has shape {tuple(former.shape)}. Pass a value with this shape, not {tuple(value.shape)}."
        )
    source = (former if value is None else value).detach()
    copies: dict[torch.device, torch.Tensor] | None = None
    if tied_params_map is not None:
        copies = tied_params_map.get(source.data_ptr())
    if copies is not None and target in copies:
        new = copies[target]  # the same object for all modules that share the weight
    else:
        moved = source.to(target, to_dtype(dtype) or former.dtype, non_blocking=non_blocking)
        new = like(former, moved)
        if fp16_statistics is not None:
            new.SCB = fp16_statistics.to(target)  # type: ignore[attr-defined]  # an attribute of bitsandbytes
        if copies is not None:
            copies[target] = new
    put(module, tensor_name, new)
    if clear_cache and former.device.type not in ("cpu", "meta") and former.device != target:
        clear_device_cache()


def _find_tensor(module: nn.Module, name: str) -> torch.Tensor | None:
    """Return a parameter or buffer by its dotted name, or None if the module has none of this name."""
    path, _, leaf = name.rpartition(".")
    owner = dict(module.named_modules()).get(path)
    if owner is None:
        return None
    return {**owner._parameters, **owner._buffers}.get(leaf)


def load_state_dict(
    checkpoint_file: PathLike, device_map: Mapping[str, Device] | None = None
) -> dict[str, torch.Tensor]:
    """Return the tensors of one file by name.

    Args:
        checkpoint_file: A file of safetensors or `torch.save`. No code in it is executed.
        device_map: Module name → device. `""` is the entry of all other tensors. Default: the CPU, also for tensors
            without an entry. Tensors on the CPU and the disk are views of a safetensors file, which are read on first
            access. Other formats are read into memory.

    Raises:
        CheckpointError: The file is missing, damaged or truncated.
        ConfigurationError: A device is unknown or not on this machine.
    """
    places = dict(device_map or {})
    check_devices(places)
    check_available(places)
    path = Path(checkpoint_file)
    stored = StoredWeights()
    if path.suffix == ".safetensors":
        stored.add_safetensors(path)
    else:
        stored.add_torch_file(path, mapped=False)  # torch.save to the same path would truncate a mapped file
    found: dict[str, torch.Tensor] = {}
    for name, tensor in stored.items():
        entry = innermost(name, places)
        device: Device = "cpu"
        if entry is not None and places[entry] != "disk":
            device = places[entry]
        found[name] = tensor.to(checked_device(device))
    return found
