"""Files with the shards of a checkpoint: `rank-00000.json` is the index of `rank-00000.safetensors`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.utils._pytree import tree_map_only

from trainwright.checkpoint.disk.planned_file import PlannedFile
from trainwright.checkpoint.disk.untrusted import inside, read_json, reading
from trainwright.checkpoint.format.codec import add_named, plan_pair
from trainwright.checkpoint.format.layout import numbered
from trainwright.checkpoint.format.regions import (
    Box,
    Region,
    Span,
    TensorShards,
    copy_common,
    fits,
    full_region,
    lengths_of,
    num_elements,
    overlap,
)
from trainwright.checkpoint.format.safetensors_io import (
    dtype_name,
    dtype_of,
    from_storable,
    read_header,
    to_storable,
)
from trainwright.core.errors import CheckpointError

RANK_STEM = "rank"


def plan_shards(folder: str, rank: int, shards: Mapping[str, TensorShards]) -> list[PlannedFile]:
    """Plan the two files in `folder` for a rank's shards of the model or the optimizers. Copies and writes nothing."""
    stem = f"{folder}/{RANK_STEM}-{rank:05d}"
    entries: list[dict[str, Any]] = []
    tensors: dict[str, torch.Tensor] = {}
    for name, full in shards.items():
        for region, values in full.held:
            if not num_elements(region):
                continue
            if tuple(values.shape) != lengths_of(region) or not fits(region, full.shape):
                raise CheckpointError(f"{name}: values of shape {tuple(values.shape)} do not fit {region}.")
            stored, _ = to_storable(values)
            entry = {
                "tensor": name,
                "stored": add_named(tensors, stored, name),
                "dtype": dtype_name(full.dtype),
                "shape": list(full.shape),
            }
            entries.append(entry | _words(region))
    return plan_pair(stem, {"pieces": entries}, tensors)


def _words(region: Region) -> dict[str, Any]:
    if isinstance(region, Span):
        return {"start": region.start, "stop": region.stop}
    return {"offsets": list(region.offsets), "lengths": list(region.lengths)}


@dataclass(frozen=True, slots=True)
class _StoredShard:
    """A shard on the disk: its file, name in the file and region, and the full tensor's name, dtype and shape."""

    tensor: str
    region: Region
    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]


class ShardFiles:
    """The shards of a checkpoint's model or optimizers, by tensor name. Files are memory-mapped.

    Args:
        folder: the checkpoint folder.
        part: name of the folder with the shards in `folder`.
        files: the files in `part` that the manifest lists.
    """

    def __init__(self, folder: Path, part: str, files: Iterable[str]) -> None:
        self._by_name: dict[str, list[_StoredShard]] = {}
        self._open: dict[Path, Any] = {}
        listed = set(files)
        for stem in numbered(listed, part, RANK_STEM):
            index = inside(folder, f"{stem}.json", str(folder))
            file = inside(folder, f"{stem}.safetensors", str(folder))
            # A rank without shards, such as one with a replica only, writes no safetensors file.
            header = read_header(file) if f"{stem}.safetensors" in listed else {}
            for shard in _read_index(index, file, header):
                self._by_name.setdefault(shard.tensor, []).append(shard)

    def find(self, name: str, shape: tuple[int, ...], dtype: str) -> SavedTensor:
        """Check that the shards of a tensor cover it without overlaps, and return the tensor. Values are read on use.

        Args:
            name: name of the tensor.
            shape: shape of the full tensor.
            dtype: name of the dtype; see `dtype_name`.

        Raises:
            CheckpointError: shards are missing, overlap, or belong to another tensor.
        """
        shards = self._by_name.get(name, [])
        for shard in shards:
            if shard.shape != shape or shard.dtype != dtype:
                raise CheckpointError(
                    f"the shards of {name!r} do not belong to a {dtype} tensor of shape {shape}: {shard.file.name} has "
                    f"a shard of a {shard.dtype} tensor of shape {shard.shape}. Copy the files of all ranks again, or "
                    "use another checkpoint."
                )
        regions = [shard.region for shard in shards]
        num_saved = sum(num_elements(region) for region in regions)
        num_expected = math.prod(shape)
        # As many elements as the tensor has, without overlaps: the shards cover it.
        if num_saved != num_expected or overlap(regions, shape):
            raise CheckpointError(
                f"the shards of {name!r} have {num_saved} elements, expected {num_expected} without overlaps. Files "
                "of a rank are missing or belong to another checkpoint. Copy the files of all ranks, or use another "
                "checkpoint."
            )
        return SavedTensor(self, name, shape, dtype)

    def read(self, name: str, shape: tuple[int, ...], dtype: str, region: Region) -> torch.Tensor:
        """Read a region of a tensor into new host memory. Other regions are not read. See `find` for the arguments."""
        # A dtype that is stored as a view of another one is assembled as that view.
        made, special = to_storable(torch.empty(lengths_of(region), dtype=dtype_of(dtype)))
        for shard in self._by_name.get(name, []):
            copy_common(made, region, self._mapped(shard), shard.region, shape)
        return from_storable(made, special)

    def _mapped(self, shard: _StoredShard) -> torch.Tensor:
        with reading(shard.file):
            if shard.file not in self._open:
                self._open[shard.file] = safe_open(shard.file, framework="pt", device="cpu")
            mapped: torch.Tensor = self._open[shard.file].get_tensor(shard.name)  # not copied
        return mapped


def _read_index(path: Path, file: Path, header: Mapping[str, Any]) -> list[_StoredShard]:
    """Return the shards in an index. A shard that differs from the safetensors `header` raises a CheckpointError."""
    shards = []
    with reading(path, f"is not an index of the shards in {file.name}"):
        for entry in read_json(path)["pieces"]:
            shard = _StoredShard(
                tensor=str(entry["tensor"]),
                region=_read_region(entry),
                file=file,
                name=str(entry["stored"]),
                dtype=str(entry["dtype"]),
                shape=_integers(entry["shape"]),
            )
            if not _matches(shard, header[shard.name]):
                raise CheckpointError(f"{path} does not match {file}: the shard {shard.name!r} differs.")
            shards.append(shard)
    return shards


def _read_region(entry: Mapping[str, Any]) -> Region:
    if "start" in entry:
        return Span(*_integers([entry["start"], entry["stop"]]))
    return Box(_integers(entry["offsets"]), _integers(entry["lengths"]))


def _matches(shard: _StoredShard, in_header: Mapping[str, Any]) -> bool:
    if not fits(shard.region, shard.shape):
        return False
    stored, _ = to_storable(torch.empty(0, dtype=dtype_of(shard.dtype)))
    pair_axis = stored.shape[1:]  # (2,) for complex numbers, which are stored as pairs of reals
    shape = (*lengths_of(shard.region), *pair_axis)
    return tuple(in_header["shape"]) == shape and in_header["dtype"] == dtype_name(stored.dtype)


def _integers(values: object) -> tuple[int, ...]:
    if not isinstance(values, list) or any(type(value) is not int or value < 0 for value in values):
        raise ValueError(f"{values!r} are not integers of at least 0")
    return tuple(values)


class SavedTensor(torch.Tensor):
    """A sharded tensor in a checkpoint. Each operation on the tensor reads the values from the files.

    The tensor has the full shape and the CPU as device. Operations return plain tensors. `ShardFiles` creates it.
    """

    _files: ShardFiles
    _name: str
    _dtype_name: str

    @staticmethod
    def __new__(cls, files: ShardFiles, name: str, shape: tuple[int, ...], dtype: str) -> SavedTensor:
        made: SavedTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype_of(dtype), device=torch.device("cpu")
        )
        made._files = files
        made._name = name
        made._dtype_name = dtype
        return made

    def __init__(self, files: ShardFiles, name: str, shape: tuple[int, ...], dtype: str) -> None:
        super().__init__()

    def read(self, region: Region) -> torch.Tensor:
        """Read a region into a new plain tensor on the CPU (see `lengths_of` for its shape)."""
        return self._files.read(self._name, tuple(self.shape), self._dtype_name, region)

    def load(self) -> torch.Tensor:
        """Read the full tensor into a new plain tensor on the CPU."""
        return self.read(full_region(tuple(self.shape)))

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]  # torch's has no types
        return f"SavedTensor({self._name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    # The methods below bypass `__torch_dispatch__`; torch's versions would access memory that does not exist.

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied: torch.Tensor = memo.setdefault(id(self), self.load())
        return copied

    def __reduce_ex__(self, protocol: object) -> Any:
        return self.load().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # torch has no types here

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array."""
        return self.load().numpy(force=force)

    def tolist(self) -> Any:
        """Return the values as nested lists."""
        return self.load().tolist()

    # As torch documents for tensor subclasses with `__torch_dispatch__`.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # torch's stub is narrower

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub is narrower
        cls, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(SavedTensor, SavedTensor.load, (args, kwargs or {}))
        return func(*args, **kwargs)


def loaded(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a `SavedTensor` as a tensor in memory. Other tensors are returned unchanged."""
    return tensor.load() if isinstance(tensor, SavedTensor) else tensor
