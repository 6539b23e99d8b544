"""Save a model's weights for other programs and for `load_checkpoint_in_model`, wherever they lie while it rests."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trainwright.bigmodels.dispatch.align import offloading_hooks
from trainwright.bigmodels.dispatch.moves import left_on_disk
from trainwright.bigmodels.quantization.quantized_layers import (
    Int8Linear,
    flatten_quantized,
    to_absmax,
    unpack_4bit_weights,
)
from trainwright.bigmodels.weights.mapped_file import FileSpan
from trainwright.bigmodels.weights.slots import stand_in
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
    """Write a model's weights into a folder, so that `load_checkpoint_in_model`, transformers and others read them.

    One process calls it, and blocks until all is on the disk; it is no collective. Written are `model.safetensors`, or
    `model-00001-of-00002.safetensors` and so on with `model.safetensors.index.json`. A former model of such names, or
    of those of the other format, is replaced as a whole: whatever ends the process, the folder holds the former weights
    or the new ones. Other files are left alone. Weights that hooks keep on the CPU or the disk are read from there, a
    few megabytes at a time.

    Args:
        model: any module. What DistributedDataParallel, DataParallel and `torch.compile` wrapped around it is not in
            the names. Tied weights are written once, under their first name; buffers that are not persistent are left
            out. Quantized layers are written in the pieces that `load_and_quantize_model` reads.
        save_directory: a folder; made where it is missing.
        max_shard_size: of the tensors in one file, in bytes or as `"5GB"`; a larger tensor gets a file of its own.
        safe_serialization: False writes `pytorch_model.bin`, or shards and an index, as `torch.save` does: pickles,
            which hold tensors alone, so that `torch.load(weights_only=True)` reads them, and all names of tied weights.
            Whoever reads them otherwise executes what they say. A shard of weights that are offloaded or on a device
            stands in host memory.

    Raises:
        ConfigurationError: `max_shard_size` is none.
        CheckpointError: the folder is a file; weights have no values (they are on the meta device, and no hook keeps
            them elsewhere), lie in pieces on several processes, or are no plain tensors; the disk is full. Files and
            folders are as before.
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
    """Write an object on the main process; the others check it alone. Not collective.

    Args:
        obj: An object that `torch.save` pickles; a dict of tensors with `safe_serialization`.
        f: A path, whose file is replaced, or an open file.
        safe_serialization: Write safetensors into a path, without a pickle. Default: False.
        is_main: This process writes. Default: True.

    Raises:
        ConfigurationError: A tensor is a shard, or safetensors cannot hold the object.
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
            f"and a {type(f).__name__}. Leave safe_serialization out, or pass those."
        )
    if is_main:
        path = Path(f)
        temporary = hidden(path, "tmp")
        try:
            write_safetensors(temporary, obj, {"format": "pt"})
            rename(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def save_sharded_model(
    values: Mapping[str, torch.Tensor],
    state: FullState,
    processes: Processes,
    save_directory: PathLike,
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
) -> None:
    """Write the weights of a model that is sharded over processes as `save_model` does. Collective; blocks.

    The main process writes; tensors are gathered one at a time while it does, so that it holds one full tensor at most.

    Args:
        values: The model's state dict, the same names on every rank; sharded or not.
        state: Gathers them.
        processes: All that hold shards.
        save_directory, max_shard_size, safe_serialization: See `save_model`.

    Raises:
        ConfigurationError: `max_shard_size` is not a size.
        CheckpointError: The main process cannot write the files; on every rank.
    """
    max_shard_bytes = _to_bytes(max_shard_size)
    if processes.rank:
        problem: str | None = None
        while (request := processes.broadcast_object(None))[0] is not None:
            state.full_tensor(values[request[0]])
        problem = request[1]
        if problem is not None:
            raise CheckpointError(f"rank 0 could not write {save_directory}: {problem}")
        return

    def read(name: str) -> Iterator[torch.Tensor]:
        processes.broadcast_object((name, None))
        yield state.full_tensor(values[name]).detach().contiguous().view(-1)

    first: dict[int, str] = {}
    weights: dict[str, Weight] = {}
    tied: dict[str, str] = {}
    for name, value in values.items():
        known = first.setdefault(id(value), name)
        if known != name:
            tied[name] = known
        elif (like := state.missing_like(value)) is not None:
            weights[name] = Weight(like, partial(read, name))
        else:
            weights[name] = Weight.of(value.detach())
    failure = "it was interrupted"
    try:
        replace_weights(
            Path(save_directory), weights, max_shard_bytes=max_shard_bytes, safe=safe_serialization, tied=tied
        )
        failure = ""
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
        raise
    finally:
        processes.broadcast_object((None, failure or None))


def save_quantized_model(model: nn.Module, save_directory: PathLike) -> Path:
    """Write a quantized model as `save_model` does, into a new folder.

    Args:
        model: as `load_and_quantize_model` returned it.
        save_directory: the folder to make.

    Returns:
        The folder, which `load_and_quantize_model` reads with the same configuration.

    Raises:
        CheckpointError: the folder exists; or see `save_model`.
    """
    target = Path(save_directory)
    if os.path.lexists(target):
        raise CheckpointError(f"{target} exists; it is not replaced. Choose another name, or use save_model.")
    save_model(model, target)
    return target


def _to_bytes(max_shard_size: int | str) -> int:
    try:
        return convert_file_size_to_int(max_shard_size)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"max_shard_size={max_shard_size!r} is no size. Write whole bytes, or text with a unit: "
            f"{_nearest_size(max_shard_size)!r}."
        ) from error


def _nearest_size(size: Any) -> int | str:
    """Return a size that may have been meant."""
    if isinstance(size, float) and 1 <= size < 2**63:
        return int(size)
    found = re.search(r"(\d+(?:\.\d+)?)\s*([kmgtp]?)", str(size), re.IGNORECASE)
    return "10GB" if found is None else f"{found[1]}{found[2].upper() or 'G'}B"


def _unwrapped(model: nn.Module) -> nn.Module:
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif isinstance(inner := model._modules.get("_orig_mod"), nn.Module):  # what torch.compile returns
            model = inner
        else:
            return model


@dataclass(frozen=True, slots=True)
class _Away:
    """A weight that is not in the module: its value, where that lies in a file, and what the model sees it as."""

    value: torch.Tensor
    span: FileSpan | None
    dtype: torch.dtype
    placeholder: torch.Tensor | None = None

    def weight(self, buffer: torch.Tensor) -> Weight:
        """Return it as one to be written; parts of files pass through `buffer`."""
        if self.span is None and self.value.dtype == self.dtype:
            return Weight.of(self.value)
        like = torch.empty(self.value.shape, dtype=self.dtype, device="meta")
        return Weight(like, lambda: (piece.to(self.dtype) for piece in self._pieces(buffer)))

    def _pieces(self, buffer: torch.Tensor) -> Iterator[torch.Tensor]:
        if self.span is None:
            return Weight.of(self.value).read()
        return _read_span(self.span, self.value.dtype, buffer)


def _read_span(span: FileSpan, dtype: torch.dtype, buffer: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a part of a file through a buffer, past the mapping, whose pages would count as this process's memory."""
    for begin in range(0, span.num_bytes, buffer.numel()):
        piece = buffer[: min(buffer.numel(), span.num_bytes - begin)]
        span.read_into(piece, begin)
        yield piece.view(dtype)


@dataclass(slots=True)
class _Collected:
    """What a model's state dict stands for, wherever it lies.

    Attributes:
        weights: by name, in the order of the state dict; nothing is read yet.
        tied: other name → the name of the same tensor in `weights`.
    """

    weights: dict[str, Weight] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    _first: dict[Any, str] = field(default_factory=dict)
    # One for all weights, which are read one after the other. Its pages are taken when something is read into them.
    _buffer: torch.Tensor = field(default_factory=lambda: torch.empty(CHUNK_BYTES, dtype=torch.uint8, device="cpu"))

    def add_all(self, model: nn.Module) -> None:
        """Add every tensor of an unwrapped model."""
        away = dict(_away(model))
        parameters = dict(model.named_parameters(remove_duplicate=False))
        _check_whole(parameters)
        unpack_4bit_weights(model)
        state = model.state_dict()
        _check_whole(state)
        scales = {
            f"{path}.scale".lstrip(".") for path, module in model.named_modules() if isinstance(module, Int8Linear)
        }
        lost = []
        for name, value in flatten_quantized(state).items():
            elsewhere = away.get(name)
            if not isinstance(value, torch.Tensor):
                raise CheckpointError(
                    f"{name!r} of the state dict is a {type(value).__name__}, which no file of weights holds. Leave it "
                    "out of the state dict, or save a checkpoint of the whole run."
                )
            if name in scales and (elsewhere is not None or _has_values(value)):
                absmax = to_absmax(value if elsewhere is None else elsewhere.value)  # by the name that bitsandbytes has
                self._add(f"{name.removesuffix('scale')}SCB", absmax, Weight.of(absmax), None)
            elif _has_values(value):
                own = parameters.get(name)
                self._add(name, value, Weight.of(_plain(name, value)), None if own is None else stand_in(own))
            elif elsewhere is not None:
                _plain(name, elsewhere.value)
                self._add(name, elsewhere.value, elsewhere.weight(self._buffer), elsewhere.placeholder)
            else:
                lost.append(name)
        if lost:
            shown = ", ".join(map(repr, lost[:_SHOWN])) + (" …" if len(lost) > _SHOWN else "")
            raise CheckpointError(
                f"{len(lost)} weights have no values that could be saved: {shown}. They are on the meta device and no "
                "hook keeps them elsewhere, or their memory is given back between uses in a run. Load a checkpoint "
                "first, or save when the run has ended."
            )

    def _add(self, name: str, value: torch.Tensor, weight: Weight, placeholder: torch.Tensor | None) -> None:
        """Add a weight, or, where its memory or what stands in its place has come already, another name of that."""
        name = plain_name(name)
        if name in self.weights or name in self.tied:
            raise CheckpointError(f"two entries of the state dict are called {name!r} without their wrappers.")
        keys: list[Any] = [(*memory_key(value, name), value.dtype, weight.like.dtype, value.is_conj())]
        if placeholder is not None:
            keys.append(id(placeholder))
        same = next((self._first[key] for key in keys if key in self._first), None)
        if same is None:
            self.weights[name] = weight
        else:
            self.tied[name] = same
        for key in keys:
            self._first.setdefault(key, same or name)


def _has_values(tensor: torch.Tensor) -> bool:
    if tensor.is_meta or tensor.layout is not torch.strided or not tensor.numel():
        return not tensor.is_meta
    return tensor.untyped_storage().nbytes() > 0


def _plain(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor if it has plain bytes."""
    try:
        to_storable(tensor)
    except CheckpointError as error:
        raise CheckpointError(f"{name!r} cannot be saved: {error}") from error
    return tensor


def _check_whole(tensors: Mapping[str, Any]) -> None:
    """Refuse what would be saved as this process's piece."""
    for name, tensor in tensors.items():
        in_pieces = type(tensor).__module__.startswith("torch.distributed")
        if in_pieces or getattr(tensor, "ds_numel", None) not in (None, getattr(tensor, "numel", int)()):
            raise CheckpointError(
                f"{name!r} lies in pieces on several processes, and this one would save its own. Save a checkpoint, "
                "and write its weights with `trainwright checkpoint export`."
            )


def _away(model: nn.Module) -> Iterator[tuple[str, _Away]]:
    """Yield the weights that are not in a model's modules, by their names in its state dict."""
    state = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    stored = left_on_disk(model)
    for name, tensor in state.items():
        if tensor.is_meta and name in stored:
            yield name, _Away(stored[name], stored.locate(name), tensor.dtype, tensor)
    for path, module in model.named_modules(remove_duplicate=False):
        for hook in offloading_hooks(module):
            for name, placeholder, value, span in hook.offloaded(module):
                full = f"{path}.{name}" if path else name
                yield full, _Away(value, span, placeholder.dtype, placeholder)
