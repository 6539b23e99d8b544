"""Offloaded weights by name, in a state dict, in a folder to which they were written, or in a checkpoint.

A folder contains one raw file for each tensor, `NAME.dat`, and an `index.json` of
`{name: {"dtype": "float32", "shape": [2, 3]}}`. Tensors that `offload_state_dict` wrote for a checkpoint also have
`"origin"`, which identifies the checkpoint. An entry `{"safetensors_file": …, "weight_name": …, "dtype": …}` refers to
a tensor in a safetensors file elsewhere.

Files are replaced by a rename: tensors that are mapped from the former file keep its content.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from trainwright.bigmodels.weights.moving import Device, to_device
from trainwright.bigmodels.weights.stored_weights import FileSpan, MappedFile, StoredWeights, copy_stored
from trainwright.checkpoint.disk.planned_file import host_bytes
from trainwright.checkpoint.disk.untrusted import check_relative, read_json
from trainwright.core.errors import CheckpointError, ConfigurationError

INDEX = "index.json"
_SUFFIX = ".dat"

Index = dict[str, dict[str, Any]]  # the content of an `index.json`
PathLike = str | os.PathLike[str]


def offload_weight(
    weight: torch.Tensor, weight_name: str, offload_folder: PathLike, index: Index | None = None
) -> Index:
    """Write one tensor to `NAME.dat` in an existing folder, under a temporary name first. Blocks.

    Returns:
        `index`, or a new dict, with the added entry of the tensor. Write the result with `save_offload_index`.

    Raises:
        CheckpointError: The tensor is on the meta device or cannot be written, or its name is not a valid file name.
            The folder is unchanged.
    """
    partial, target = _write_beside(weight, weight_name, Path(offload_folder))
    _put_in_place(partial, target)
    if index is None:
        index = {}
    index[weight_name] = _entry(weight)
    return index


def _write_beside(weight: torch.Tensor, name: str, folder: Path) -> tuple[Path, Path]:
    """Write a tensor to a temporary file. Return the temporary and the final path."""
    if weight.is_meta:
        raise CheckpointError(f"{name!r} is on the meta device: it has no values to write. Load them first.")
    target = folder / (check_relative(name, "the model") + _SUFFIX)
    try:
        content = memoryview(host_bytes(weight)) if weight.numel() else b""
        return _write_bytes(target, content), target
    except OSError as error:
        room = f" {_free_bytes(folder)} bytes are free there." if folder.is_dir() else ""
        raise CheckpointError(
            f"{name!r} ({weight.nbytes} bytes) could not be written to {folder}: {error.strerror}.{room}"
        ) from error


def _write_bytes(target: Path, content: bytes | memoryview) -> Path:
    """Write a file under a temporary name. Return its path. After an error, the file is deleted."""
    partial = target.with_name(target.name + ".partial")
    try:
        partial.write_bytes(content)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return partial


def _write_index_beside(index: Index, folder: Path) -> tuple[Path, Path]:
    """Write an index to a temporary file. Return the temporary and the final path."""
    return _write_bytes(folder / INDEX, json.dumps(index, indent=2).encode()), folder / INDEX


def _entry(weight: torch.Tensor) -> dict[str, Any]:
    """Return a tensor's entry in the index."""
    return {"dtype": str(weight.dtype).removeprefix("torch."), "shape": list(weight.shape)}


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def load_offloaded_weight(weight_file: PathLike, weight_info: Mapping[str, Any]) -> torch.Tensor:
    """Map a tensor of `offload_weight` into memory, given its file and its entry in the index.

    Raises:
        CheckpointError: The file is missing or too short, or the entry has no dtype or shape.
    """
    tensor, _ = _map_file(Path(weight_file), weight_info)
    return tensor


def _map_file(path: Path, info: Mapping[str, Any]) -> tuple[torch.Tensor, FileSpan | None]:
    """Return the tensor in a file, and its location. None for an empty tensor, whose file cannot be mapped."""
    dtype = getattr(torch, str(info.get("dtype")), None)
    shape = info.get("shape")
    if not isinstance(dtype, torch.dtype) or not isinstance(shape, list):
        raise CheckpointError(f"{path}: its entry {dict(info)!r} in the index has no dtype and shape of torch.")
    if 0 in shape:
        return torch.empty(shape, dtype=dtype), None
    file = MappedFile(path)
    tensor = file.tensor(0, dtype, shape)
    return tensor, FileSpan(file, 0, tensor.nbytes)


def save_offload_index(index: Index, offload_folder: PathLike) -> None:
    """Write or replace `index.json` in a folder. An empty index is not written.

    Raises:
        CheckpointError: The index cannot be written. The folder is unchanged.
    """
    if not index:
        return
    folder = Path(offload_folder)
    try:
        partial, target = _write_index_beside(index, folder)
    except OSError as error:
        raise _not_written(INDEX, folder, error) from error
    _put_in_place(partial, target)


def _put_in_place(partial: Path, target: Path) -> None:
    """Rename a temporary file to its final name, or delete it and raise a `CheckpointError`."""
    try:
        os.replace(partial, target)  # existing mappings keep the former file
    except OSError as error:
        _remove([partial], [])
        raise _not_written(target.name, target.parent, error) from error


def _not_written(name: str, folder: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{name} cannot be written to {folder}: {error.strerror}. Use another folder.")


def offload_state_dict(
    save_dir: PathLike, state_dict: Mapping[str, torch.Tensor], *, origin: str | None = None
) -> None:
    """Write tensors into a folder, one file each, and add them to its index.

    Existing files with these names are replaced after all new files are complete, so both need disk space.

    Args:
        save_dir: A folder; created if it does not exist.
        state_dict: Tensors on any device except meta. Tensors that share memory are written separately.
        origin: Identifies the source of the tensors. Stored in the index. Default: None, which stores nothing.

    Raises:
        CheckpointError: The tensors do not fit on the disk, which is checked first, or cannot be written, or the
            folder's index is damaged. Files and folders are unchanged, unless a rename fails: some files are then new.
    """
    folder = Path(save_dir).absolute()
    new_folders = [path for path in (folder, *folder.parents) if not path.exists()]  # innermost first
    existing = new_folders[-1].parent if new_folders else folder
    if not existing.is_dir():
        raise CheckpointError(f"weights cannot be offloaded to {folder}: {existing} is a file. Pass a folder.")
    num_bytes = sum(tensor.nbytes for tensor in state_dict.values())
    if num_bytes > _free_bytes(existing):
        raise CheckpointError(
            f"offloading to {folder} needs {num_bytes} bytes and the disk has {_free_bytes(existing)} free. Free "
            "space, use another folder, or offload less of the model."
        )
    index = read_offload_index(folder)
    written: list[tuple[Path, Path]] = []  # temporary and final paths
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, tensor in state_dict.items():
            written.append(_write_beside(tensor, name, folder))
            index[name] = _entry(tensor)
            if origin is not None:
                index[name]["origin"] = origin
        written.append(_write_index_beside(index, folder))
        for partial, target in written:  # the index, which names the others, last
            os.replace(partial, target)
    except BaseException as error:
        _remove([partial for partial, _ in written], new_folders)
        if isinstance(error, OSError):
            raise CheckpointError(
                f"weights cannot be offloaded to {folder}: {error.strerror}. Use another folder."
            ) from error
        raise


def _remove(files: list[Path], folders: list[Path]) -> None:
    """Remove temporary files, and the folders that were created for them, innermost first."""
    # Their own errors are suppressed: the error that led here is raised instead.
    for file in files:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def read_offload_index(folder: PathLike) -> Index:
    """Return the index of a folder of offloaded weights. Empty if the folder has no index.

    Raises:
        CheckpointError: The index is damaged.
    """
    path = Path(folder) / INDEX
    if not path.is_file():
        return {}
    index = read_json(path)
    if not isinstance(index, dict) or not all(isinstance(entry, dict) for entry in index.values()):
        raise CheckpointError(
            f"{path} is not an index of offloaded weights: expected an entry with dtype and shape for each name."
        )
    return index


class OffloadedWeightsLoader(Mapping[str, torch.Tensor]):
    """Mapping of names to tensors, from a state dict or else from the disk. Tensors on the disk are mapped, not read.

    Args:
        state_dict: Tensors in memory.
        save_folder: A folder that `offload_state_dict` wrote. Not needed if all entries of `index` refer to safetensors
            files.
        index: Index to use instead of the folder's index.
        device: The device of returned tensors. Default: they are not moved.

    Raises:
        ConfigurationError: `state_dict`, `save_folder` and `index` are all missing.
        CheckpointError: The folder's index is damaged. On access, a file is missing or too short. An unknown name
            raises a KeyError.
    """

    def __init__(
        self,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        save_folder: PathLike | None = None,
        index: Mapping[str, Mapping[str, Any]] | None = None,
        device: Device | None = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ConfigurationError(
                "offloaded weights need a state_dict, a save_folder or an index; got none of them."
            )
        self.state_dict: Mapping[str, torch.Tensor] = {} if state_dict is None else state_dict
        self.save_folder = save_folder
        if index is None:
            index = {} if save_folder is None else read_offload_index(save_folder)
        self.index = index
        self.device = None if device is None else to_device(device)
        self._found: dict[str, tuple[torch.Tensor, FileSpan | None]] = {}  # the results of `on_disk` so far, by name
        self._files: dict[str, StoredWeights] = {}  # the safetensors files of these results, by path

    def __deepcopy__(self, memo: dict[int, Any]) -> OffloadedWeightsLoader:
        state_dict = copy.deepcopy(self.state_dict, memo)
        twin = OffloadedWeightsLoader(state_dict, self.save_folder, self.index, self.device)
        twin._found = {name: copy_stored(*found, memo) for name, found in self._found.items()}
        twin._files = copy.deepcopy(self._files, memo)
        return twin

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self.state_dict:
            tensor = self.state_dict[name]
        else:
            tensor, _ = self.on_disk(name)
        return tensor if self.device is None else tensor.to(self.device)

    def __iter__(self) -> Iterator[str]:
        yield from self.state_dict
        yield from (name for name in self.index if name not in self.state_dict)

    def __len__(self) -> int:
        return len(self.state_dict) + sum(name not in self.state_dict for name in self.index)

    def locate(self, name: str) -> FileSpan | None:
        """Return the location of a tensor in a file; None for one in memory."""
        if name in self.state_dict:
            locate = getattr(self.state_dict, "locate", None)
            return None if locate is None else locate(name)
        _, span = self.on_disk(name)
        return span

    def on_disk(self, name: str) -> tuple[torch.Tensor, FileSpan | None]:
        """Return a mapped tensor of the index, and its location in a file. Ignores the state dict.

        Raises:
            KeyError: The name is not in the index.
            CheckpointError: A file is missing or too short, or lacks the tensor.
        """
        if name not in self._found:
            self._found[name] = self._find(name, self.index[name])
        return self._found[name]

    def _find(self, name: str, entry: Mapping[str, Any]) -> tuple[torch.Tensor, FileSpan | None]:
        file = entry.get("safetensors_file")
        if file is None:  # a file of `offload_weight`
            if self.save_folder is None:
                raise CheckpointError(
                    f"the index has no file for {name!r}. Pass the folder of its weights (save_folder)."
                )
            return _map_file(Path(self.save_folder) / (check_relative(name, "the index") + _SUFFIX), entry)
        stored = self._files.get(file)
        if stored is None:
            stored = StoredWeights()
            stored.add_safetensors(Path(file))
            self._files[file] = stored
        inner = entry.get("weight_name", name)
        if inner not in stored:
            raise CheckpointError(f"{file} lacks {inner!r}, which the index lists. Copy the file again.")
        tensor = stored[inner]
        span = stored.locate(inner)
        dtype = getattr(torch, str(entry.get("dtype")), tensor.dtype)
        if dtype != tensor.dtype:
            return tensor.to(dtype), None  # a copy in memory
        return tensor, span


class PrefixedDataset(Mapping[str, torch.Tensor]):
    """A view of the entries whose names begin with `prefix`, such as `"block.linear."`, by names without the prefix."""

    def __init__(self, dataset: Mapping[str, torch.Tensor], prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.dataset[self.prefix + key]

    def __iter__(self) -> Iterator[str]:
        start = len(self.prefix)
        return (key[start:] for key in self.dataset if key.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def locate(self, key: str) -> FileSpan | None:
        """Return the location of a tensor in a file; None for one in memory."""
        locate = getattr(self.dataset, "locate", None)
        return None if locate is None else locate(self.prefix + key)
