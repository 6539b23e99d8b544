"""Saves of a model's weights, including offloaded ones, for other programs and for `load_checkpoint_in_model`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trainwright.bigmodels.dispatch.align import offloading_hooks
from trainwright.bigmodels.quantization.quantized_layers import (
    Int8Linear,
    flatten_quantized,
    to_absmax,
    unpack_4bit_weights,
)
from trainwright.bigmodels.weights.placeholders import in_files, partly_offloaded
from trainwright.bigmodels.weights.stored_weights import FileSpan
from trainwright.checkpoint.disk.durable import CHUNK_BYTES, hidden, rename
from trainwright.checkpoint.disk.planned_file import Weight
from trainwright.checkpoint.format.model import memory_key
from trainwright.checkpoint.format.safetensors_io import to_storable, write_safetensors
from trainwright.checkpoint.interop.weights_folder import replace_weights
from trainwright.core.errors import CheckpointError, ConfigurationError
from trainwright.core.host.byte_sizes import convert_file_size_to_int
from trainwright.core.names.hidden_names import plain_name
from trainwright.core.tree import iterate_tensors
from trainwright.processes.process_group import Processes
from trainwright.strategies.state import FullState

PathLike = str | os.PathLike[str]

_SHOWN = 5  # names in a message


def save_model(
    model: nn.Module,
    save_directory: PathLike,
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
) -> None:
    """Write a model's weights to a folder that `load_checkpoint_in_model`, transformers and others can read.

    Call this function on one process. Not collective. Blocks until the files are on the disk. The files are
    `model.safetensors`, or `model-00001-of-00002.safetensors` etc. with `model.safetensors.index.json`. An earlier
    model in the folder, of either format, is replaced atomically: after a crash, the folder contains the old or the new
    weights. Other files are not changed. Offloaded weights are read a few megabytes at a time.

    Args:
        model: Any module. Prefixes of DistributedDataParallel, DataParallel and `torch.compile` are removed from names.
            Tied weights are written once, under their first name. Non-persistent buffers are not written. Quantized
            layers are written in the format of `load_and_quantize_model`.
        save_directory: A folder; created if it does not exist.
        max_shard_size: Largest size of a file, in bytes or as `"5GB"`. A larger tensor gets its own file.
        safe_serialization: False writes `pytorch_model.bin`, or shards and an index, with `torch.save`. Tied weights
            are then written under all their names. Load these files with `torch.load(weights_only=True)`, because other
            readers may execute code in pickles. Offloaded weights and weights on a device are copied to host memory,
            one shard at a time.

    Raises:
        ConfigurationError: `max_shard_size` is not a size.
        CheckpointError: The folder is a file, the disk is full, or a weight has no values (on the meta device and not
            offloaded), is sharded over processes, or has a type that cannot be saved. Files and folders are unchanged.
    """
    max_shard_bytes = _to_bytes(max_shard_size)
    found = _Collected()
    found.add_all(_unwrapped(model))
    replace_weights(
        Path(save_directory),
        found.weights,
        max_shard_bytes=max_shard_bytes,
        safe=safe_serialization,
        tied=found.tied,
    )


def save_object(
    obj: object, f: PathLike | IO[bytes], safe_serialization: bool = False, *, is_main: bool = True
) -> None:
    """Write an object on the main process. Other processes only check the object. Not collective.

    Safetensors are first written to a temporary file, which replaces an existing file. Other objects are written
    directly by `torch.save`.

    Args:
        obj: An object that `torch.save` can pickle. With `safe_serialization`, a dict of tensors.
        f: A path or an open file. An existing file at the path is replaced.
        safe_serialization: Write safetensors into a path, without a pickle. Default: False.
        is_main: This process writes. Default: True.

    Raises:
        ConfigurationError: A tensor is a shard, or `safe_serialization` is set for another object than a dict of
            tensors or for an open file.
        CheckpointError: Safetensors cannot store the dtype of a tensor.
        OSError: The file cannot be written.
    """
    if any(isinstance(tensor, DTensor) for tensor in iterate_tensors(obj)):
        raise ConfigurationError(
            "save() was given tensors that are sharded over processes. Pass accelerator.get_state_dict(model), called "
            "on every process, or use save_model or save_state."
        )
    if not safe_serialization:
        if is_main:
            torch.save(obj, f)
        return
    if not isinstance(f, (str, os.PathLike)) or not isinstance(obj, Mapping):
        raise ConfigurationError(
            f"save(safe_serialization=True) writes a dict of tensors to a path; it received a {type(obj).__name__} "
            f"and a {type(f).__name__}. Pass a dict and a path, or safe_serialization=False."
        )
    for name, value in obj.items():
        if not isinstance(value, torch.Tensor):
            raise ConfigurationError(
                f"save(safe_serialization=True) writes a dict of tensors; {name!r} is a {type(value).__name__}. Remove "
                "it, or pass safe_serialization=False."
            )
    if is_main:
        path = Path(f)
        temporary = hidden(path, "tmp")
        try:
            write_safetensors(temporary, obj, {"format": "pt"})
            rename(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


class _Request(NamedTuple):
    """A message of the main process in `save_sharded_model`: a tensor to gather, or the end of the save."""

    name: str | None  # None at the end
    problem: str | None = None  # the error that ended the save, or None


def save_sharded_model(
    values: Mapping[str, torch.Tensor],
    state: FullState,
    processes: Processes,
    save_directory: PathLike,
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
) -> None:
    """Write the weights of a model that is sharded over processes like `save_model`. Collective. Blocks.

    The main process writes. Tensors are gathered one at a time, so that at most one full tensor is in memory.

    Args:
        values: The model's state dict, with sharded or full tensors. Names must be the same on every rank.
        state: Gathers the sharded tensors.
        processes: All processes with shards.
        save_directory, max_shard_size, safe_serialization: See `save_model`, also for the errors. Errors are raised on
            every rank.
    """
    max_shard_bytes = _to_bytes(max_shard_size)
    if processes.rank:
        # Gather each tensor that rank 0 writes, in its order.
        while True:
            request: _Request = processes.broadcast_object(None)
            if request.name is None:
                break
            state.gather_tensor(values[request.name])
        if request.problem is not None:
            raise CheckpointError(f"rank 0 could not write {save_directory}: {request.problem}")
        return

    def read(name: str) -> Iterator[torch.Tensor]:
        processes.broadcast_object(_Request(name))
        yield state.gather_tensor(values[name]).detach().contiguous().view(-1)

    first_names: dict[int, str] = {}  # id of a tensor → its first name
    weights: dict[str, Weight] = {}
    tied: dict[str, str] = {}  # further names of tensors → their first name
    for name, value in values.items():
        first_name = first_names.setdefault(id(value), name)
        if first_name != name:
            tied[name] = first_name
            continue
        like = state.missing_like(value)
        if like is None:
            weights[name] = Weight.of(value.detach())
        else:
            weights[name] = Weight(like, partial(read, name))
    problem: str | None = "it was interrupted"  # by another exception than an Exception, such as KeyboardInterrupt
    try:
        replace_weights(
            Path(save_directory), weights, max_shard_bytes=max_shard_bytes, safe=safe_serialization, tied=tied
        )
        problem = None
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise
    finally:  # in every case, because the other ranks wait for it
        processes.broadcast_object(_Request(None, problem))


def save_quantized_model(model: nn.Module, save_directory: PathLike) -> Path:
    """Write a quantized model like `save_model` into a new folder. Return the folder.

    `load_and_quantize_model` reads it with the same configuration.

    Raises:
        CheckpointError: The folder, or a file of this name, exists, or `save_model` raises it.
    """
    target = Path(save_directory)
    if os.path.lexists(target):
        raise CheckpointError(f"{target} exists and is not replaced. Choose another name, or use save_model.")
    save_model(model, target)
    return target


def _to_bytes(max_shard_size: int | str) -> int:
    try:
        return convert_file_size_to_int(max_shard_size)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"max_shard_size={max_shard_size!r} is not a size. Pass a number of bytes, or text with a unit, such as "
            f"{_nearest_size(max_shard_size)!r}."
        ) from error


def _nearest_size(size: object) -> int | str:
    """Return a valid size that is similar to an invalid one."""
    if isinstance(size, float) and 1 <= size < 2**63:
        return int(size)
    match = re.search(r"(\d+(?:\.\d+)?)\s*([kmgtp]?)", str(size), re.IGNORECASE)
    if match is None:
        return "10GB"
    unit = match[2].upper() or "G"
    return f"{match[1]}{unit}B"


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside the wrappers of data parallelism and `torch.compile`."""
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif isinstance(inner := model._modules.get("_orig_mod"), nn.Module):  # the wrapper of torch.compile
            model = inner
        else:
            return model


@dataclass(frozen=True, slots=True)
class _Offloaded:
    """An offloaded weight."""

    value: torch.Tensor
    span: FileSpan | None  # location of the value in a file. None if it is in memory.
    dtype: torch.dtype  # of the placeholder. The value is converted to it.
    placeholder: torch.Tensor

    def weight(self, buffer: torch.Tensor) -> Weight:
        """Return the weight to write. Files are read through `buffer`."""
        if self.span is None and self.value.dtype == self.dtype:
            return Weight.of(self.value)
        like = torch.empty(self.value.shape, dtype=self.dtype, device="meta")
        return Weight(like, lambda: (chunk.to(self.dtype) for chunk in self._chunks(buffer)))

    def _chunks(self, buffer: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the value in its stored dtype."""
        if self.span is None:
            return Weight.of(self.value).read()
        return _read_span(self.span, self.value.dtype, buffer)


def _read_span(span: FileSpan, dtype: torch.dtype, buffer: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the content of a part of a file in chunks that share `buffer`.

    Does not use the mapping of the file, because its pages would count as memory of this process.
    """
    for begin in range(0, span.num_bytes, buffer.numel()):
        chunk = buffer[: min(buffer.numel(), span.num_bytes - begin)]
        span.read_into(chunk, begin)
        yield chunk.view(dtype)


@dataclass(slots=True)
class _Collected:
    """The weights in a model's state dict in order, including offloaded weights, and the names of tied weights.

    Attributes:
        weights: First name of each weight → the weight.
        tied: Further names of weights → their first name.
    """

    weights: dict[str, Weight] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    _first: dict[Any, str] = field(default_factory=dict)  # key of a memory, or id of a placeholder → first name
    # Shared by all weights, which are read one after the other. Memory is allocated on first use.
    _buffer: torch.Tensor = field(default_factory=lambda: torch.empty(CHUNK_BYTES, dtype=torch.uint8, device="cpu"))

    def add_all(self, model: nn.Module) -> None:
        """Add every tensor of an unwrapped model."""
        all_offloaded = dict(_offloaded_weights(model))
        parameters = dict(model.named_parameters(remove_duplicate=False))
        # Id of a parameter that only some modules offload → id of its placeholder in these modules.
        placeholders = {id(parameter): key for key, parameter in partly_offloaded(model).items()}
        _check_not_sharded(parameters)
        unpack_4bit_weights(model)  # before the state dict, which it changes
        state = model.state_dict()
        _check_not_sharded(state)
        scales: set[str] = set()  # names of the scales of `Int8Linear` layers
        for path, module in model.named_modules():
            if isinstance(module, Int8Linear):
                scales.add(f"{path}.scale".lstrip("."))
        lost = []
        for name, value in flatten_quantized(state).items():
            offloaded = all_offloaded.get(name)
            if not isinstance(value, torch.Tensor):
                raise CheckpointError(
                    f"{name!r} in the state dict is a {type(value).__name__}, but a file of weights contains only "
                    "tensors. Remove it from the state dict, or save a checkpoint of the Trainer."
                )
            if name in scales and (offloaded is not None or _has_values(value)):
                absmax = to_absmax(value if offloaded is None else offloaded.value)  # under bitsandbytes' name
                self._add(f"{name.removesuffix('scale')}SCB", absmax, Weight.of(absmax), None)
            elif _has_values(value):
                placeholder = placeholders.get(id(parameters.get(name)))
                self._add(name, value, Weight.of(_storable(name, value)), placeholder)
            elif offloaded is not None:
                _storable(name, offloaded.value)
                self._add(name, offloaded.value, offloaded.weight(self._buffer), id(offloaded.placeholder))
            else:
                lost.append(name)
        if lost:
            shown = ", ".join(map(repr, lost[:_SHOWN])) + (" …" if len(lost) > _SHOWN else "")
            raise CheckpointError(
                f"{len(lost)} weights have no values to save: {shown}. They are on the meta device and not offloaded, "
                "or a running training has freed their memory between uses. Load a checkpoint first, or save after "
                "the training."
            )

    def _add(self, name: str, value: torch.Tensor, weight: Weight, placeholder: int | None) -> None:
        """Add a weight. If its memory or placeholder was added under another name, add only a tied name."""
        name = plain_name(name)
        if name in self.weights or name in self.tied:
            raise CheckpointError(
                f"two entries of the state dict are called {name!r} without their wrappers. Rename one of them."
            )
        # Views with another dtype, and conjugate views, are different weights in the same memory.
        keys: list[Any] = [(*memory_key(value, name), value.dtype, weight.like.dtype, value.is_conj())]
        if placeholder is not None:
            keys.append(placeholder)
        first_name = next((self._first[key] for key in keys if key in self._first), None)
        if first_name is None:
            self.weights[name] = weight
        else:
            self.tied[name] = first_name
        for key in keys:
            self._first.setdefault(key, first_name or name)


def _has_values(tensor: torch.Tensor) -> bool:
    """Return False for meta tensors, and for tensors whose memory a strategy has freed (a storage of 0 bytes)."""
    if tensor.is_meta:
        return False
    if tensor.layout is not torch.strided or not tensor.numel():
        return True
    return tensor.untyped_storage().nbytes() > 0


def _storable(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor if files can store it. Otherwise, raise an error."""
    try:
        to_storable(tensor)
    except CheckpointError as error:
        raise CheckpointError(f"{name!r} cannot be saved: {error}") from error
    return tensor


def _check_not_sharded(tensors: Mapping[str, Any]) -> None:
    """Raise an error if a tensor is sharded, because only this process's shard would be saved."""
    for name, tensor in tensors.items():
        is_dtensor = type(tensor).__module__.startswith("torch.distributed")
        # DeepSpeed's stage 3 stores the number of elements of the full parameter in this attribute.
        full_elements = getattr(tensor, "ds_numel", None)
        is_deepspeed_shard = full_elements is not None and full_elements != tensor.numel()
        if is_dtensor or is_deepspeed_shard:
            raise CheckpointError(
                f"{name!r} is sharded over processes, and only the shard of this one would be saved. Save a "
                "checkpoint, and write its weights with `trainwright checkpoint export`."
            )


def _offloaded_weights(model: nn.Module) -> Iterator[tuple[str, _Offloaded]]:
    """Yield a model's offloaded weights by their names in its state dict."""
    state = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    stored = in_files(model)
    for name, tensor in state.items():
        if tensor.is_meta and name in stored:  # loaded to the disk. A hook that loads it is found below, too.
            yield name, _Offloaded(stored[name], stored.locate(name), tensor.dtype, tensor)
    for path, module in model.named_modules(remove_duplicate=False):
        for hook in offloading_hooks(module):
            for name, placeholder, value, span in hook.offloaded(module):
                full = f"{path}.{name}" if path else name
                yield full, _Offloaded(value, span, placeholder.dtype, placeholder)
