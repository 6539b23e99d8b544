"""Conversion of torchao's quantized optimizer states to plain tensors and back.

torchao stores a state in a tensor subclass with codes of 8 or 4 bits, and a scale for each block of codes. A checkpoint
stores the tensors of codes and scales in a dictionary. Reading creates only the classes that this module lists.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch

from trainwright.core.errors import CheckpointError, require_package
from trainwright.core.tree import is_sharded

KIND = "quantized"  # the key of the class name in a flattened state
# Class of torchao → its module. All take codes, a scale and a dtype; `qmap` and `signed` exist for 8 and 4 bits only.
_MODULES = {
    "OptimState8bit": "torchao.optim.subclass_8bit",
    "OptimState4bit": "torchao.optim.subclass_4bit",
    "OptimStateFp8": "torchao.optim.subclass_fp8",
}


def is_quantized(tensor: torch.Tensor) -> bool:
    """Return whether a tensor, or this rank's shard of it, is a quantized state of torchao."""
    kind = type(_local(tensor))
    return _MODULES.get(kind.__name__) == kind.__module__


def flatten_quantized(tensor: torch.Tensor) -> Any:
    """Return a quantized state as a dictionary of its inner tensors, without copies. Return other tensors unchanged.

    Keys: `"quantized"` (the name of the class), `"shape"`, `"dtype"`, `"signed"`, and the tensors `"codes"` (in bytes),
    `"scale"` and, for 8 and 4 bits, `"qmap"`. The tensors of a sharded state are sharded in the same way.
    """
    if not is_quantized(tensor):
        return tensor
    local: Any = _local(tensor)
    codes = local.codes.view(torch.uint8)
    # Codes of 8 bits have the shape of the tensor. Codes of 4 bits are a vector with two codes in each byte.
    codes_shape = None if codes.dim() == 1 else tuple(tensor.shape)
    flat: dict[str, Any] = {KIND: type(local).__name__, "shape": tensor.shape, "dtype": local.dtype}
    flat["signed"] = getattr(local, "signed", True)
    flat["codes"] = _sharded_like(codes, tensor, codes_shape)
    flat["scale"] = _sharded_like(local.scale, tensor, None)
    if hasattr(local, "qmap"):
        flat["qmap"] = local.qmap
    return flat


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor. Other tensors are returned unchanged."""
    if not is_sharded(tensor):
        return tensor
    local: torch.Tensor = tensor.to_local()
    return local


def is_flat(value: object) -> bool:
    """Return whether a value is a dictionary that `flatten_quantized` returned for a quantized state."""
    return type(value) is dict and value.get(KIND) in list(_MODULES)


def _check(flat: dict[str, Any]) -> None:
    """Check that the tensors of a flattened state have the shapes and dtypes that the optimizer step needs."""
    name = flat[KIND]
    shape = flat.get("shape")
    codes = flat.get("codes")
    scale = flat.get("scale")
    if not isinstance(codes, torch.Tensor) or not isinstance(scale, torch.Tensor) or not isinstance(shape, torch.Size):
        raise CheckpointError(f"a saved {name} lacks its shape, codes or scale.")
    # Two codes of 4 bits are in one byte.
    codes_shape = (shape.numel() / 2,) if name == "OptimState4bit" else tuple(shape)
    codes_fit = codes.dtype == torch.uint8 and tuple(codes.shape) == codes_shape
    scale_fits = scale.dim() == 1 and scale.numel() > 0 and shape.numel() % scale.numel() == 0
    if not codes_fit or not scale_fits:
        raise CheckpointError(f"a saved {name} of shape {tuple(shape)} has codes or a scale of another shape or dtype.")
    if name == "OptimStateFp8":
        return
    qmap = flat.get("qmap")
    num_values = 16 if name == "OptimState4bit" else 256
    if not isinstance(qmap, torch.Tensor) or qmap.shape != (num_values,):
        raise CheckpointError(f"a saved {name} lacks its table of {num_values} values.")


def shard_quantized(flat: dict[str, Any], like: torch.Tensor, shard: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """Shard the full tensors of a result of `flatten_quantized` like the parameter `like`. Not collective.

    `shard(full, like)` shards one tensor. If ranks would share a block of codes, a `CheckpointError` is raised.
    """
    _check(flat)
    if not is_sharded(like):
        return flat
    num_elements = math.prod(flat["shape"])
    local = like.to_local()
    rows_fit = tuple(like.shape) == tuple(flat["shape"]) and is_even(like)
    sharded = dict(flat)
    for name in ("codes", "scale"):
        full = flat[name]
        # This rank has the same fraction of the codes and scales as of the parameter's elements: with 512 of 1024
        # elements, it has 2 of 4 blocks.
        num_local, remainder = divmod(local.numel() * full.numel(), num_elements)
        if remainder or not rows_fit:
            raise CheckpointError(
                f"a quantized state of shape {tuple(flat['shape'])} has {flat['scale'].numel()} blocks, which cannot "
                "be sharded like the parameter. Use another number of ranks, or strategy='ddp'."
            )
        part = torch.empty(num_local, dtype=full.dtype, device=local.device)
        shape = None
        if full.dim() != 1:  # codes of 8 bits of a matrix
            part = part.view_as(local)
            shape = tuple(full.shape)
        sharded[name] = shard(full, _sharded_like(part, like, shape))
    return sharded


def is_even(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is sharded along its rows only, with the same number of rows on every rank."""
    if not is_sharded(tensor):
        return True
    axes = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if len(axes) != 1:
        return not axes
    return tensor.placements[axes[0]].is_shard(0) and tensor.shape[0] % tensor.device_mesh.size(axes[0]) == 0


def build_quantized(value: Any, device: torch.device) -> Any:
    """Convert each result of `flatten_quantized` in nested dicts back to a quantized tensor on `device`."""
    if type(value) is not dict:
        return value
    if not is_flat(value):
        return {key: build_quantized(item, device) for key, item in value.items()}
    _check(value)
    try:
        return _built(value, device)
    except (AssertionError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"the saved {value[KIND]} cannot be read: {error!r}.") from error


def _built(flat: dict[str, Any], device: torch.device) -> torch.Tensor:
    """Return the quantized tensor for a result of `flatten_quantized`, whose shapes and dtypes have been checked."""
    name = flat[KIND]
    kind: Any = getattr(require_package(_MODULES[name], purpose="The saved optimizer state"), name)
    shape = tuple(flat["shape"])
    codes = _local(flat["codes"]).to(device)
    scale = _local(flat["scale"]).to(device)
    if name == "OptimStateFp8":
        local = kind(codes.view(torch.float8_e4m3fn), scale, flat["dtype"])
        return _sharded_like(local, flat["codes"], shape)
    arguments = [codes, scale, flat["qmap"].to(device), flat["signed"]]
    if name == "OptimState4bit":
        # The class needs the shape of this rank's shard, whose codes are a vector with two codes in each byte.
        num_rows = codes.numel() * 2 // (math.prod(shape[1:]) or 1)
        arguments.append((num_rows, *shape[1:]))
    return _sharded_like(kind(*arguments, flat["dtype"]), flat["codes"], shape)


def _sharded_like(local: torch.Tensor, like: torch.Tensor, shape: tuple[int, ...] | None) -> torch.Tensor:
    """Return the DTensor whose shard on this rank is `local`, sharded like `like`. An unsharded `like` returns `local`.

    `shape` is the full shape. None means a vector with the same number of elements on every rank. Not collective.
    """
    if not is_sharded(like):
        return local
    kind: Any = sys.modules["torch.distributed.tensor"].DTensor
    if shape is None:
        num_elements = local.numel()
        for axis, placement in enumerate(like.placements):
            if not placement.is_replicate():
                num_elements *= like.device_mesh.size(axis)
        shape = (num_elements,)
    stride = torch.empty(shape, device="meta").stride()
    sharded: torch.Tensor = kind.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
    return sharded
