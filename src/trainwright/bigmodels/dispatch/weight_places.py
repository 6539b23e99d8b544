"""The weights of a model, and the place of each one: a device, host memory, the disk, or a hook that offloads it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainwright.bigmodels.dispatch.attach import innermost
from trainwright.bigmodels.dispatch.checkpoint_names import LoadedKeys, match, report, shortened
from trainwright.bigmodels.dispatch.model_weights import Weight, compare, find_weights, new_value
from trainwright.bigmodels.dispatch.moves import refuse_moves
from trainwright.bigmodels.weights.moving import Device, to_device
from trainwright.bigmodels.weights.placeholders import (
    ReplacedWeight,
    like,
    placeholder,
    replaced_weight,
    without_guard,
)
from trainwright.bigmodels.weights.slots import put, restored
from trainwright.bigmodels.weights.stored_weights import FileSpan, StoredWeights
from trainwright.bigmodels.weights.weights_map import OffloadedWeightsLoader, offload_state_dict, read_offload_index
from trainwright.core.errors import CheckpointError, ConfigurationError

PathLike = str | os.PathLike[str]

_CPU = torch.device("cpu")
_SHOWN = 5  # names in a message


class WeightPlaces:
    """All weights of a model, and their places in a device map.

    `fill` loads a checkpoint to these places. `fill_empty` and then `offload` provide the values for hooks. The methods
    use the places that the constructor has computed, so create another object after a change of the model.

    Args:
        model: The model, which the methods change.
        device_map: Module name → device, `"cpu"` or `"disk"`, on this machine. Weights that it does not cover stay
            where they are, or are loaded to the CPU if they are on the meta device. Default: None, which covers no
            weights.
        state_dict: Values of offloaded weights, and of weights on the meta device. Default: those of the model.
        folder: Folder of weights on the disk, to which other weights for the disk are written. Default: None, which
            raises an error if weights have to be written.
        index: The index of the folder. Default: its `index.json`.
        offload_buffers: The map also puts buffers on the disk. Default: False.

    Attributes:
        weights: All parameters and buffers.
        saved: Those in state dicts: `weights` without non-persistent buffers.
    """

    def __init__(
        self,
        model: nn.Module,
        device_map: Mapping[str, Device] | None = None,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        folder: PathLike | None = None,
        index: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        offload_buffers: bool = False,
    ) -> None:
        self.model = model
        self.device_map = device_map
        self.state_dict = state_dict
        self.folder = folder
        self.index = index
        self.offload_buffers = offload_buffers
        self.weights = find_weights(model)
        self.saved = [weight for weight in self.weights if weight.is_saved]
        for weight in self.weights:
            weight.device = self._device_of(weight)

    @cached_property
    def _on_disk(self) -> OffloadedWeightsLoader:
        """The weights in the folder. Read on first use, after `fill` has written to it."""
        return OffloadedWeightsLoader({}, self.folder, self.index)

    def fill(
        self,
        stored: StoredWeights,
        checkpoint: PathLike,
        *,
        dtype: torch.dtype | None,
        keep_in_fp32: Collection[str],
        strict: bool,
        needs_values: bool = False,
    ) -> LoadedKeys:
        """Load the weights of a checkpoint to their places. All checks precede the first change of the model.

        Args:
            stored: The weights of the checkpoint.
            checkpoint: Its path, for messages and for the index of `folder`.
            dtype, keep_in_fp32: See `Weight.choose_dtype`.
            strict: Raise an error if names differ. Otherwise, a warning names them.
            needs_values: Raise an error if a weight has no values after loading.

        Returns:
            The names that differ.

        Raises:
            CheckpointError: Shapes or kinds of dtypes differ, a file cannot be read or written, names differ with
                `strict`, or values are missing with `needs_values`.
            ConfigurationError: Weights have to be written to the disk, and `folder` is None.
        """
        keys = match(self.saved, stored)
        not_stored = [weight for weight in self.saved if weight.source is None]
        empty = [weight.names[0] for weight in not_stored if not weight.has_values]
        if needs_values:
            self._check_has_values(not_stored, empty, checkpoint)
        report(keys, empty, checkpoint, strict)
        loaded = [weight for weight in self.saved if weight.source is not None]
        for weight in loaded:
            weight.choose_dtype(dtype, keep_in_fp32)
        compare(loaded, stored, checkpoint)
        on_disk = [weight for weight in loaded if weight.device is None]
        others = [weight for weight in loaded if weight.device is not None]
        # Everything that may fail comes before the first change: writing to the folder, and reading of values.
        files = _in_files(on_disk, stored, self.folder, checkpoint)
        values = [new_value(weight, stored) for weight in others]  # None for weights to overwrite in place
        for weight in on_disk:
            name = weight.names[0]
            self._replace_offloaded(weight, files[name], files.locate(name))
        for weight, value in zip(others, values, strict=True):
            if value is None:
                self._overwrite(weight, stored)
            elif weight.hooked:
                self._replace_offloaded(weight, value, None)
            else:
                self.assign(weight, like(weight.tensor, value))
        if on_disk:
            refuse_moves(self.model)
        return keys

    def assign(self, weight: Weight, new: torch.Tensor) -> None:
        """Put a new tensor into the model under all names of a weight."""
        weight.tensor = new
        for name in weight.names:
            put(self.model, name, new)

    def fill_empty(self) -> None:
        """Replace meta tensors by CPU tensors, which use the memory of a value in `state_dict` or of a file.

        Tensors with values are not changed, nor are those that the map puts on the disk or on the meta device.

        Raises:
            CheckpointError: A tensor has no value, or its value has another shape.
        """
        missing: list[str] = []
        with without_guard():
            for weight in self.weights:
                if not weight.tensor.is_meta or weight.device is None or weight.device.type == "meta":
                    continue
                value = None
                if self.state_dict is not None:
                    value = weight.find_in(self.state_dict)
                if value is None:
                    in_file = self._find_in_files(weight)
                    if in_file is not None:
                        value, _ = in_file
                if value is None:
                    missing.append(weight.names[0])
                    continue
                if value.shape != weight.tensor.shape:
                    raise CheckpointError(
                        f"{weight.names[0]!r} has shape {tuple(value.shape)}, expected {tuple(weight.tensor.shape)}."
                    )
                self.assign(weight, restored(weight.tensor, value.detach().to("cpu", weight.tensor.dtype)))
        if missing:
            raise CheckpointError(
                f"{len(missing)} tensors have no values: {_first(missing, repr)}. They are on the meta device, and the "
                "device map does not put them on the disk. Load a checkpoint first (load_checkpoint_and_dispatch), "
                "pass a state_dict that contains them, or offload buffers too (offload_buffers=True)."
            )

    def offload(self, entries: Collection[str]) -> StoredWeights:
        """Return the values that hooks load, of weights whose map entry is in `entries` (`"cpu"`, `"disk"`).

        The values are those in `state_dict`, or those of the model without a `state_dict`. Call `fill_empty` first.

        A weight for the disk that another module has in memory keeps this memory. Otherwise, its value is taken from
        `state_dict`, the model, a file of an earlier offload, or the folder, in this order. If it is in memory, it is
        written to the folder. Tied weights are written once.

        Raises:
            CheckpointError: A weight has no value, or cannot be written.
            ConfigurationError: Weights have to be written to the disk, and the folder is None.
        """
        values = StoredWeights()
        # Names of a weight for the disk, and its value. All are written together, after the checks.
        to_write: list[tuple[list[str], torch.Tensor]] = []
        not_given: list[str] = []
        missing: list[str] = []
        for weight in self.saved:
            if weight.is_buffer and not self.offload_buffers:
                continue
            # A tied weight may be on the CPU under one name, and on the disk under another one.
            host_names = [name for name in weight.names if "cpu" in entries and self._entry(name) == "cpu"]
            disk_names = [name for name in weight.names if "disk" in entries and self._entry(name) == "disk"]
            in_memory = None if weight.tensor.is_meta else weight.tensor.detach()
            value = in_memory if self.state_dict is None else weight.find_in(self.state_dict)

            if host_names and value is not None:
                values.add_all(host_names, value.detach().to("cpu"))
            elif host_names:
                not_given.append(host_names[0])

            if not disk_names:
                continue
            if weight.device is not None and in_memory is not None:  # another module has it in memory
                values.add_all(disk_names, in_memory)
                continue
            if value is None:  # not in `state_dict`
                value = in_memory
            if value is not None:
                to_write.append((disk_names, value))
                continue
            stored = self._find_in_files(weight)
            if stored is None:
                missing.append(disk_names[0])
            else:
                values.add_all(disk_names, *stored)
        if not_given:
            raise CheckpointError(
                f"{len(not_given)} offloaded weights are on the CPU and not in state_dict: {_first(not_given, repr)}. "
                "Add them, or omit state_dict to offload the model's values."
            )
        if missing:
            raise CheckpointError(
                f"{len(missing)} offloaded weights are neither in the model nor on the disk: "
                f"{_first(missing)}. Load a checkpoint first, or pass their folder as offload_dir."
            )
        if to_write:
            _write(to_write, self.folder, values)
        return values

    def _find_in_files(self, weight: Weight) -> tuple[torch.Tensor, FileSpan | None] | None:
        """Return a weight that is in a file of an earlier offload or in the folder, and its location, or None."""
        replaced = replaced_weight(weight.tensor)
        if replaced is not None and replaced.value is not None:
            return replaced.value, replaced.span
        # The first name is tried first, because `_write` stores a tied weight under it.
        for name in weight.names:
            if name in self._on_disk:
                return self._on_disk.on_disk(name)
        return None

    def _entry(self, name: str) -> Device | None:
        """Return the device of a tensor in the map. None if the map does not contain it."""
        assert self.device_map is not None
        block = innermost(name, self.device_map)
        return None if block is None else self.device_map[block]

    def _device_of(self, weight: Weight) -> torch.device | None:
        """Return the device of a weight, or None if it is on the disk."""
        entries: list[Device] = []
        if self.device_map is not None:
            for name in weight.names:
                entry = self._entry(name)
                if entry is not None:
                    entries.append(entry)
        if not entries:
            return _current_device(weight)
        # A shared tensor goes to the device of its first module that is not on the disk.
        for entry in entries:
            if entry != "disk":
                return to_device(entry)
        # Other buffers are on the CPU until a hook moves them. State dicts lack non-persistent ones.
        goes_to_disk = not weight.is_buffer or (self.offload_buffers and weight.is_saved)
        return None if goes_to_disk else _CPU

    def _check_has_values(self, not_stored: list[Weight], empty: list[str], checkpoint: PathLike) -> None:
        """Raise if `dispatch_model` would raise because of missing values, before weights are overwritten.

        `not_stored` are the weights that are not in the checkpoint. `empty` are the names of those without values.
        """
        if empty:
            raise CheckpointError(
                f"{checkpoint} does not contain {shortened(empty)}, and the model has no values for them: they are on "
                "the meta device. Load a checkpoint that contains them, or initialize them first."
            )
        to_write = []
        for weight in not_stored:
            if weight.device is None and not weight.tensor.is_meta:
                to_write.append(weight.names[0])
        if to_write and self.folder is None:
            raise ConfigurationError(
                f"the device map puts {shortened(to_write)} on the disk, and {checkpoint} does not contain them. Pass "
                "offload_folder, a folder to write the model's own values to."
            )

    @torch.no_grad()
    def _overwrite(self, weight: Weight, stored: StoredWeights) -> None:
        """Copy a value from the checkpoint into the existing memory of a weight."""
        assert weight.source is not None
        if not weight.hooked:
            weight.tensor.copy_(stored[weight.source])
            self.assign(weight, weight.tensor)  # modules that have a placeholder for it use the tensor, too
            return
        copied: set[int] = set()  # ids, since hooks of tied weights share one value and tensors compare by content
        for each in weight.hooked:
            if id(each.value) not in copied:
                each.value.copy_(stored[weight.source])
                copied.add(id(each.value))
        # After all copies, so that no hook prefetches a former value.
        for each in weight.hooked:
            each.hook.forget()

    def _replace_offloaded(self, weight: Weight, value: torch.Tensor, span: FileSpan | None) -> None:
        """Put a placeholder for a value on the disk or in hooks into the model, and the value into the hooks.

        `span` is the location of `value` in a file. None: the value is in memory.
        """
        former = replaced_weight(weight.tensor)
        # A new record, because `restored_on_failure` may put the former placeholder back.
        replaced = ReplacedWeight() if former is None else ReplacedWeight(former.device, former.original)
        if weight.device is None:
            replaced.value = value
            replaced.span = span
            replaced.label = repr(weight.names[0])
        else:
            replaced.device = value.device
        self.assign(weight, placeholder(weight.tensor, replaced, weight.dtype))
        # `replace` requires the new placeholder in the module.
        for each in weight.hooked:
            each.hook.replace(each.module, each.name, value, span)


def _current_device(weight: Weight) -> torch.device | None:
    """Return the device of a weight that no map covers, or None if a hook loads it from the disk."""
    if weight.hooked:
        return None if weight.is_hooked_on_disk else weight.hooked[0].value.device
    return _CPU if weight.tensor.is_meta else weight.tensor.device


def _first(names: list[str], show: Callable[[str], str] = str) -> str:
    """Return the first names as text, with an ellipsis if there are more."""
    text = ", ".join(show(name) for name in names[:_SHOWN])
    return f"{text} …" if len(names) > _SHOWN else text


def _in_files(
    weights: list[Weight], stored: StoredWeights, folder: PathLike | None, checkpoint: PathLike
) -> StoredWeights:
    """Return the weights on the disk by their first name. Those not in safetensors are written to the folder first."""
    files = StoredWeights()
    to_write: dict[str, torch.Tensor] = {}
    for weight in weights:
        assert weight.source is not None
        name = weight.names[0]
        span = stored.locate(weight.source)
        if span is None:
            to_write[name] = stored[weight.source]
        else:
            files.add(name, stored[weight.source], span)
    if to_write:
        written = _write_once(to_write, folder, checkpoint)
        for name in to_write:
            files.add(name, *written.on_disk(name))
    return files


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
    files = [checkpoint]
    if not checkpoint.is_file():
        files = sorted(path for path in checkpoint.iterdir() if path.is_file())
    facts = [str(checkpoint.resolve())]
    for path in files:
        status = path.stat()
        facts.append(f"{path.name}:{status.st_size}:{status.st_mtime_ns}")
    return " ".join(facts)


def _write(tensors: list[tuple[list[str], torch.Tensor]], folder: PathLike | None, weights: StoredWeights) -> None:
    """Write tensors into the folder under the first of their names, and add them to `weights` under all names."""
    if folder is None:
        first_names, _ = tensors[0]
        raise ConfigurationError(
            f"the device map puts {first_names[0]!r} and {len(tensors) - 1} other weights on the disk, but they "
            "are only in memory. Pass offload_dir, a folder to write them to."
        )
    offload_state_dict(folder, {names[0]: tensor for names, tensor in tensors})
    stored = OffloadedWeightsLoader(save_folder=folder)
    for names, _ in tensors:
        weights.add_all(names, *stored.on_disk(names[0]))
