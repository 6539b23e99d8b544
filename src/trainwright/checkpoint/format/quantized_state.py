"""Conversion of torchao's quantized optimizer states to plain tensors and back.

torchao stores a state, such as `exp_avg`, in a tensor subclass: a code of 8 or 4 bits for each element, and a scale for
each block of codes. A checkpoint stores a dictionary with the tensors of codes and scales instead. For a parameter of
shape (8, 128), which has 1024 elements, and blocks of 256 elements, `flatten_quantized` returns:

    "quantized"   "OptimState8bit"   "OptimState4bit"   "OptimStateFp8"
    "shape"       (8, 128)           (8, 128)           (8, 128)
    "dtype"       float32            float32            float32           the dtype that the state has for torch
    "signed"      True or False      True or False      True              False for states that are never negative
    "codes"       uint8 (8, 128)     uint8 (512,)       uint8 (8, 128)    two codes of 4 bits in a byte
    "scale"       float32 (4,)       float32 (4,)       float32 (4,)
    "qmap"        float32 (256,)     float32 (16,)      no entry          the value of each code, before scaling

If the parameter is a DTensor, the state is a DTensor whose local tensor is an object of torchao's class. "codes" and
"scale" are then DTensors, and "qmap" is a plain tensor, which is the same on all ranks.

Reading creates only the classes that this module lists.
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
_BITS_8 = "OptimState8bit"
_BITS_4 = "OptimState4bit"
_FP8 = "OptimStateFp8"
# Class of torchao → its module.
_MODULES = {
    _BITS_8: "torchao.optim.subclass_8bit",
    _BITS_4: "torchao.optim.subclass_4bit",
    _FP8: "torchao.optim.subclass_fp8",
}


def is_quantized(tensor: torch.Tensor) -> bool:
    """Return whether a tensor, or this rank's shard of it, is a quantized state of torchao."""
    kind = type(_local(tensor))
    return _MODULES.get(kind.__name__) == kind.__module__


def flatten_quantized(tensor: torch.Tensor) -> Any:
    """Return a quantized state as a dictionary of its inner tensors, without copies. Return other tensors unchanged.

    The module's docstring lists the keys. The tensors of a sharded state are sharded in the same way. Not collective.
    """
    if not is_quantized(tensor):
        return tensor
    state: Any = _local(tensor)
    codes = state.codes.view(torch.uint8)  # the codes of OptimStateFp8 are float8
    if codes.dim() == 1:
        # The packed codes of 4 bits, or the codes of a vector.
        codes = _sharded_like(codes, tensor, None)
    else:
        codes = _sharded_like(codes, tensor, tuple(tensor.shape))
    flat: dict[str, Any] = {
        KIND: type(state).__name__,
        "shape": tensor.shape,
        "dtype": state.dtype,
        "signed": getattr(state, "signed", True),  # OptimStateFp8 has no such attribute, since float8 has a sign
        "codes": codes,
        "scale": _sharded_like(state.scale, tensor, None),
    }
    if hasattr(state, "qmap"):
        flat["qmap"] = state.qmap
    return flat


def is_flat(value: object) -> bool:
    """Return whether a value is a dictionary that `flatten_quantized` returned for a quantized state."""
    return type(value) is dict and value.get(KIND) in list(_MODULES)


def build_quantized(value: Any, device: torch.device) -> Any:
    """Convert each result of `flatten_quantized` in nested dicts back to a quantized tensor on `device`.

    Other values are returned unchanged. Not collective.

    Raises:
        CheckpointError: a result lacks an entry, or its tensors do not fit each other.
    """
    if type(value) is not dict:
        return value
    if not is_flat(value):
        return {key: build_quantized(item, device) for key, item in value.items()}
    _check(value)
    try:
        return _built(value, device)
    except (AssertionError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"the saved {value[KIND]} cannot be read: {error!r}.") from error


def _check(flat: dict[str, Any]) -> None:
    """Check that the tensors of a flattened state have the shapes and dtypes that the optimizer step needs.

    The constructors of torchao check dtypes and numbers of dimensions, but not sizes.
    """
    name = flat[KIND]
    shape = flat.get("shape")
    codes = flat.get("codes")
    scale = flat.get("scale")
    if not isinstance(codes, torch.Tensor) or not isinstance(scale, torch.Tensor) or not isinstance(shape, torch.Size):
        raise CheckpointError(f"a saved {name} lacks its shape, codes or scale.")
    if name == _BITS_4:
        codes_shape: tuple[float, ...] = (shape.numel() / 2,)  # two codes in a byte; not an integer for odd numbers
    else:
        codes_shape = tuple(shape)
    codes_fit = codes.dtype == torch.uint8 and tuple(codes.shape) == codes_shape
    # All blocks have the same number of elements.
    scale_fits = scale.dim() == 1 and scale.numel() > 0 and shape.numel() % scale.numel() == 0
    if not codes_fit or not scale_fits:
        raise CheckpointError(f"a saved {name} of shape {tuple(shape)} has codes or a scale of another shape or dtype.")
    if name == _FP8:
        return
    qmap = flat.get("qmap")
    num_values = 16 if name == _BITS_4 else 256
    if not isinstance(qmap, torch.Tensor) or qmap.shape != (num_values,):
        raise CheckpointError(f"a saved {name} lacks its table of {num_values} values.")


def _built(flat: dict[str, Any], device: torch.device) -> torch.Tensor:
    """Return the quantized tensor for a result of `flatten_quantized` that has been checked."""
    name = flat[KIND]
    kind: Any = getattr(require_package(_MODULES[name], purpose="The saved optimizer state"), name)
    shape = tuple(flat["shape"])
    codes = _local(flat["codes"]).to(device)
    scale = _local(flat["scale"]).to(device)
    if name == _FP8:
        state = kind(codes.view(torch.float8_e4m3fn), scale, flat["dtype"])
    elif name == _BITS_4:
        # The class needs the shape of this rank's shard, which packed codes do not have. States are sharded along rows.
        elements_per_row = math.prod(shape[1:]) or 1
        num_rows = 2 * codes.numel() // elements_per_row
        local_shape = (num_rows, *shape[1:])
        state = kind(codes, scale, flat["qmap"].to(device), flat["signed"], local_shape, flat["dtype"])
    else:
        state = kind(codes, scale, flat["qmap"].to(device), flat["signed"], flat["dtype"])
    return _sharded_like(state, flat["codes"], shape)


def shard_quantized(flat: dict[str, Any], like: torch.Tensor, shard: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """Shard the full tensors of a result of `flatten_quantized` like the parameter `like`. Not collective.

    Args:
        flat: the flattened state with full tensors, as it was read from a checkpoint.
        like: the parameter. If it is not sharded, `flat` is returned unchanged.
        shard: function with the arguments (full tensor, DTensor), which returns the full tensor sharded like the
            DTensor.

    Raises:
        CheckpointError: `flat` is damaged, two ranks would share a block of codes, the shapes of `flat` and `like`
            differ, or ranks have different numbers of the parameter's rows.
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
        # elements, it has 2 of 4 scales. A remainder is a block that two ranks share.
        num_local, remainder = divmod(local.numel() * full.numel(), num_elements)
        if remainder or not rows_fit:
            raise CheckpointError(
                f"a quantized state of shape {tuple(flat['shape'])} has {flat['scale'].numel()} blocks, which cannot "
                "be sharded like the parameter. Use another number of ranks, or strategy='ddp'."
            )
        # `shard` needs a DTensor of the result's shape and placements, whose values do not matter.
        empty = torch.empty(num_local, dtype=full.dtype, device=local.device)
        if full.dim() == 1:
            target = _sharded_like(empty, like, None)
        else:
            # Only codes that are not packed have several dimensions, which are those of the parameter.
            target = _sharded_like(empty.view_as(local), like, tuple(full.shape))
        sharded[name] = shard(full, target)
    return sharded


def is_even(tensor: torch.Tensor) -> bool:
    """Return whether every rank has the same number of complete rows of a tensor.

    This is the case if the tensor is sharded along its rows over one axis of the mesh, and the axis's size divides the
    number of rows. A tensor that is not sharded is even, too.
    """
    if not is_sharded(tensor):
        return True
    sharded_axes = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if not sharded_axes:
        return True
    if len(sharded_axes) > 1:
        return False
    [axis] = sharded_axes
    is_along_rows: bool = tensor.placements[axis].is_shard(0)
    return is_along_rows and tensor.shape[0] % tensor.device_mesh.size(axis) == 0


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor. Other tensors are returned unchanged."""
    if not is_sharded(tensor):
        return tensor
    local: torch.Tensor = tensor.to_local()
    return local


def _sharded_like(local: torch.Tensor, like: torch.Tensor, shape: tuple[int, ...] | None) -> torch.Tensor:
    """Return a DTensor with the shard `local` on this rank and the mesh and placements of `like`. Not collective.

    If `like` is not a DTensor, `local` is returned unchanged.

    Args:
        local: this rank's shard.
        like: tensor whose mesh and placements the result has.
        shape: shape of the full tensor. None for a vector of which all ranks have the same number of elements.
    """
    if not is_sharded(like):
        return local
    # `like` is a DTensor, so its module is imported already. An import here would load it in all other runs.
    kind: Any = sys.modules["torch.distributed.tensor"].DTensor
    if shape is None:
        num_elements = local.numel()
        for axis, placement in enumerate(like.placements):
            if not placement.is_replicate():
                num_elements *= like.device_mesh.size(axis)
        shape = (num_elements,)
    stride = torch.empty(shape, device="meta").stride()
    # Without shape and stride, `from_local` computes them from the local shard, which is wrong for uneven shards.
    # `run_check=True` would be collective.
    sharded: torch.Tensor = kind.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
    return sharded
