"""Tensors of a model one at a time: put one somewhere else, or read those of a file onto devices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from trainwright.bigmodels.dispatch.align import TiedParams
from trainwright.bigmodels.dispatch.attach import innermost
from trainwright.bigmodels.dispatch.loading import PathLike, to_dtype
from trainwright.bigmodels.maps.device_map import check_devices
from trainwright.bigmodels.weights.moving import Device, check_present, present_device
from trainwright.bigmodels.weights.slots import like, put
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
    """Put one parameter or buffer on a device, with other values or in another dtype on request.

    A new tensor stands in its place afterwards, of the same class and attributes. Other modules that share it keep the
    one that they have: `retie_parameters`.

    Args:
        module: is changed.
        tensor_name: of a parameter or buffer in it, dotted where it belongs to a module within.
        device: where it goes.
        value: of the tensor's shape; its present values unless given.
        dtype: of what stands there afterwards; the tensor's own unless given.
        fp16_statistics: scales of the rows of a weight of bitsandbytes in int8.
        tied_params_map: by the address of a weight's memory, its copies on devices: one that is there is taken.
        non_blocking: do not wait for the copy.
        clear_cache: hand an accelerator's memory that is not used any more back.

    Raises:
        ConfigurationError: there is no such tensor, the device is not here, the shape differs, or a tensor on the meta
            device would need values. The module is as before.
    """
    path, _, leaf = tensor_name.rpartition(".")
    modules = dict(module.named_modules())
    owner = modules.get(path)
    tables = {} if owner is None else {**owner._parameters, **owner._buffers}
    former = tables.get(leaf)
    if former is None:
        known = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
        raise ConfigurationError(f"{type(module).__name__} has no tensor {tensor_name!r}.{nearest(tensor_name, known)}")
    target = present_device(device)
    if value is None and former.is_meta and target.type != "meta":
        raise ConfigurationError(f"{tensor_name!r} is on the meta device: pass the value that it has on {target}.")
    if value is not None and value.shape != former.shape:
        raise ConfigurationError(
            f"{tensor_name!r} has shape {tuple(former.shape)}, and the value given has {tuple(value.shape)}."
        )
    source = (former if value is None else value).detach()
    copies = None if tied_params_map is None else tied_params_map.get(source.data_ptr())
    new = None if copies is None else copies.get(target)
    if new is None:
        moved = source.to(target, to_dtype(dtype) or former.dtype, non_blocking=non_blocking)
        new = like(former, moved)
        if fp16_statistics is not None:
            new.SCB = fp16_statistics.to(target)  # type: ignore[attr-defined]  # where bitsandbytes looks for it
        if copies is not None:
            copies[target] = new
    put(module, tensor_name, new)
    if clear_cache and former.device.type not in ("cpu", "meta") and former.device != target:
        clear_device_cache()


def load_state_dict(
    checkpoint_file: PathLike, device_map: Mapping[str, Device] | None = None
) -> dict[str, torch.Tensor]:
    """Return the tensors of one file by name.

    Args:
        checkpoint_file: `.safetensors`, or what `torch.save` wrote; nothing that it says is executed.
        device_map: module name → device. Tensors on the CPU and the disk are views of a safetensors file, read when
            they are touched; so is everything without a map. Those of other files are read into memory. `""` stands for
            all the rest, the CPU unless given.

    Raises:
        CheckpointError: the file is missing, damaged or cut short.
        ConfigurationError: a device is none, or not here.
    """
    places = dict(device_map or {})
    check_devices(places)
    check_present(places)
    path, stored = Path(checkpoint_file), StoredWeights()
    if path.suffix == ".safetensors":
        stored.add_safetensors(path)
    else:
        stored.add_torch_file(path, mapped=False)  # torch.save to the same path would cut what is mapped
    found: dict[str, torch.Tensor] = {}
    for name, tensor in stored.items():
        entry = innermost(name, places)
        device = "cpu" if entry is None or places[entry] == "disk" else places[entry]
        found[name] = tensor.to(present_device(device))
    return found
