"""The weights of a checkpoint by name, mapped from its files and read on first access.

A checkpoint is one or more files of safetensors or `torch.save`. The index of several files has the layout of
transformers (`weight_map`), or is an object of names and files.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from trainwright.bigmodels.weights.mapped_file import FileSpan, MappedFile
from trainwright.checkpoint.disk.untrusted import check_relative, read_json, reading
from trainwright.checkpoint.format.safetensors_io import DTYPES, NATIVE_NAMES, from_storable, read_header
from trainwright.core.errors import CheckpointError

_INDEX_SUFFIX = ".index.json"
_SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
_DTYPES = DTYPES | {name: dtype for dtype, name in NATIVE_NAMES.items()}


class StoredWeights(Mapping[str, torch.Tensor]):
    """Name → tensor on the CPU, mapped from a file. Created by `read_checkpoint`.

    Names that the checkpoint's index ties have the same tensor. Writes to a tensor never reach the file.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._spans: dict[str, FileSpan] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredWeights:
        twin = StoredWeights()
        for name, tensor in self._tensors.items():
            twin.add(name, *copy_stored(tensor, self._spans.get(name), memo))
        return twin

    def locate(self, name: str) -> FileSpan | None:
        """Return the location of a tensor in a safetensors file, or None."""
        return self._spans.get(name)

    def add(self, name: str, tensor: torch.Tensor, span: FileSpan | None = None) -> None:
        """Add a tensor, and its location if it is a view of a file."""
        self._tensors[name] = tensor
        if span is not None:
            self._spans[name] = span

    def update(self, others: StoredWeights, prefix: str = "") -> None:
        """Add the tensors and locations of others, with `prefix` before their names."""
        self._tensors |= {prefix + name: tensor for name, tensor in others._tensors.items()}
        self._spans |= {prefix + name: span for name, span in others._spans.items()}

    def add_alias(self, name: str, same: str) -> None:
        """Add `name` for the tensor that is called `same`."""
        self._tensors[name] = self._tensors[same]
        if same in self._spans:
            self._spans[name] = self._spans[same]

    def add_safetensors(self, path: Path, names: Iterable[str] | None = None) -> None:
        """Add the tensors of a safetensors file with the given names. Default: all.

        Raises:
            CheckpointError: The file is damaged or truncated, or does not contain one of `names`.
        """
        file = MappedFile(path)
        header = read_header(path)
        header.pop("__metadata__", None)
        begin = 8 + int.from_bytes(file.tensor(0, torch.uint8, (8,)).numpy().tobytes(), "little")
        for name in header if names is None else names:
            if name not in header:
                raise CheckpointError(f"{path} does not contain {name!r}, which is listed in the index.")
            start, dtype, shape = _entry(header[name], name, path)
            self._tensors[name] = file.tensor(begin + start, dtype, shape)
            self._spans[name] = FileSpan(file, begin + start, self._tensors[name].nbytes)

    def add_torch_file(self, path: Path, names: Iterable[str] | None = None, *, mapped: bool = True) -> None:
        """Add tensors of a state dict that `torch.save` wrote. No code in the file is executed.

        Do not write to the file while its tensors are `mapped`: `torch.save` truncates it first.

        Raises:
            CheckpointError: The file is damaged, is not a dict of tensors, or does not contain one of `names`.
        """
        from trainwright.checkpoint.interop.torch_file import read_torch_file

        found, unknown = read_torch_file(path, mapped=mapped)
        if isinstance(found, dict) and isinstance(found.get("state_dict"), dict):
            found = found["state_dict"]
        if unknown or not isinstance(found, dict):
            raise CheckpointError(
                f"{path} is not a state dict of tensors" + (f": it contains {', '.join(unknown)}." if unknown else ".")
            )
        for name in found if names is None else names:
            if not isinstance(found.get(name), torch.Tensor):
                raise CheckpointError(f"{path} does not contain the tensor {name!r}.")
            self._tensors[name] = found[name]


def copy_stored(
    tensor: torch.Tensor, span: FileSpan | None, memo: dict[int, Any]
) -> tuple[torch.Tensor, FileSpan | None]:
    """Return a deep copy of a tensor and of its location. A mapped tensor is mapped again, not read."""
    if span is None:
        return copy.deepcopy(tensor, memo), None
    twin = copy.deepcopy(span, memo)
    found = twin.file.counterpart(tensor, span.file)
    return (copy.deepcopy(tensor, memo) if found is None else found), twin


def _entry(entry: Any, name: str, path: Path) -> tuple[int, torch.dtype, list[int]]:
    """Return the offset, dtype and shape in an entry of the header, after checking them."""
    try:
        dtype, shape = _DTYPES[entry["dtype"]], [int(size) for size in entry["shape"]]
        start, end = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: the entry of {name!r} cannot be read: {error!r}.") from error
    if start < 0 or min(shape, default=0) < 0 or end - start != torch.Size(shape).numel() * dtype.itemsize:
        raise CheckpointError(f"{path}: {name!r} has {end - start} bytes, which does not match {dtype} {shape}.")
    return start, dtype, shape


def read_checkpoint(checkpoint: Path) -> StoredWeights:
    """Map the weights of a checkpoint. Reads only the headers of its files.

    Args:
        checkpoint: A file of weights, an index (`*.index.json`, or JSON of names and files), or a folder with either.
            In a folder, an index is preferred to a file and safetensors to other formats. A checkpoint of the Trainer
            has its weights in `model/`.

    Raises:
        CheckpointError: There are no weights, a file is missing, damaged or truncated, or an index points outside its
            folder.
    """
    weights = StoredWeights()
    with reading(checkpoint):
        path = _find(checkpoint)
        if path.suffix == ".json":
            _add_indexed(weights, path)
        else:
            _add_file(weights, path, None)
    return weights


def _find(checkpoint: Path) -> Path:
    if checkpoint.is_file():
        return checkpoint
    if not checkpoint.is_dir():
        raise CheckpointError(f"{checkpoint} is neither a file nor a folder. Check the path.")
    indexes = sorted(
        checkpoint.glob(f"*{_INDEX_SUFFIX}"), key=lambda path: (".safetensors." not in path.name, path.name)
    )
    plain = checkpoint / "index.json"
    if not indexes and plain.is_file() and not _is_offload_index(plain):
        return plain
    if indexes:
        kinds = [path for path in indexes if (".safetensors." in path.name) == (".safetensors." in indexes[0].name)]
        if len(kinds) > 1:
            names = ", ".join(path.name for path in kinds)
            raise CheckpointError(f"{checkpoint} contains several indexes: {names}. Pass the path of the one to load.")
        return indexes[0]
    for name in _SINGLE_FILES:
        if (checkpoint / name).is_file():
            return checkpoint / name
    from trainwright.checkpoint.interop.weights_folder import shards_of

    for suffix in _SUFFIXES:
        found = sorted(checkpoint.glob(f"*{suffix}"))
        if len(found) == 1 and shards_of(found[0]) > 1:
            raise CheckpointError(
                f"{checkpoint} is incomplete: it contains one of {shards_of(found[0])} shards, {found[0].name}, and no "
                "index of the others. Copy the missing files."
            )
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(path.name for path in found)
            raise CheckpointError(f"{checkpoint} contains {names} and no index. Pass the path of the file to load.")
    if (checkpoint / "model").is_dir():  # a checkpoint of the Trainer
        return _find(checkpoint / "model")
    raise CheckpointError(
        f"{checkpoint} contains no weights: no index and no {', '.join(_SUFFIXES)} file. Pass another path."
    )


def _is_offload_index(path: Path) -> bool:
    """Return whether an `index.json` belongs to offloaded weights, which may be in the checkpoint's folder."""
    index = read_json(path)
    entries = list(index.values()) if isinstance(index, dict) else []
    return bool(entries) and all(isinstance(entry, dict) and "dtype" in entry and "shape" in entry for entry in entries)


def _add_indexed(weights: StoredWeights, path: Path) -> None:
    index = read_json(path)
    notes: Any = {}
    weight_map = index
    if isinstance(index, dict) and isinstance(index.get("weight_map"), dict):
        weight_map = index["weight_map"]
        metadata = index.get("metadata")
        notes = metadata.get("trainwright", {}) if isinstance(metadata, dict) else {}
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(
            f"{path} is not an index of weights: expected an object of names and files, or one as its weight_map."
        )
    by_file: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        by_file.setdefault(check_relative(file, str(path)), []).append(name)
    for file, names in by_file.items():
        if not (path.parent / file).is_file():
            raise CheckpointError(f"{path} lists the file {file!r}, which is missing.")
        _add_file(weights, path.parent / file, names)
    _add_notes(weights, notes, path)


def _add_notes(weights: StoredWeights, notes: Mapping[str, Any], path: Path) -> None:
    """Apply the entries that this package adds to an index: dtypes that safetensors lacks, and tied names."""
    for name, dtype in dict(notes.get("dtypes", {})).items():
        if name in weights:
            weights.add(name, from_storable(weights[name], dtype))
    for name, same in dict(notes.get("tied", {})).items():
        if same not in weights:
            raise CheckpointError(f"{path} ties {name!r} to {same!r}, which it does not contain.")
        weights.add_alias(name, same)


def _add_file(weights: StoredWeights, path: Path, names: Iterable[str] | None) -> None:
    if path.suffix == ".safetensors":
        weights.add_safetensors(path, names)
    else:
        weights.add_torch_file(path, names)
