"""Files with the shards of a checkpoint: `rank-00000.json` is the index of `rank-00000.safetensors`.

An index has an entry for each shard. The rank that has the lower half of a weight of shape (8, 4) writes

    {"pieces": [{"tensor": "layer.weight", "stored": "layer.weight", "dtype": "F32", "shape": [8, 4],
                 "offsets": [4, 0], "lengths": [4, 4]}]}

`tensor` is the name in the tree (see `codec`), and `stored` the name in the safetensors file. They differ if a rank has
several shards of a tensor. A `Span` has `start` and `stop` instead of `offsets` and `lengths`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

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
    """Plan the files in `folder` for a rank's shards of the model or the optimizers. Copies and writes nothing.

    A rank without shards has an index only.
    """
    stem = f"{folder}/{RANK_STEM}-{rank:05d}"
    entries: list[dict[str, Any]] = []
    tensors: dict[str, torch.Tensor] = {}
    for name, shards_of_tensor in shards.items():
        for region, values in shards_of_tensor.held:
            if not num_elements(region):
                continue
            if tuple(values.shape) != lengths_of(region) or not fits(region, shards_of_tensor.shape):
                raise CheckpointError(f"{name}: values of shape {tuple(values.shape)} do not fit {region}.")
            stored, _ = to_storable(values)  # the second result is the entry's `dtype` below, or None
            entry = {
                "tensor": name,
                "stored": add_named(tensors, stored, name),
                "dtype": dtype_name(shards_of_tensor.dtype),
                "shape": list(shards_of_tensor.shape),
            }
            entries.append(entry | _region_entries(region))
    return plan_pair(stem, {"pieces": entries}, tensors)


def _region_entries(region: Region) -> dict[str, Any]:
    """Return the entries of an index for a region. `_read_region` reverses this."""
    if isinstance(region, Span):
        return {"start": region.start, "stop": region.stop}
    return {"offsets": list(region.offsets), "lengths": list(region.lengths)}


class Shard(Protocol):
    """What `StoredShards` needs to know about a shard.

    Attributes:
        region: the elements of the full tensor that the shard contains.
        dtype: dtype of the full tensor, as a result of `dtype_name`.
        shape: shape of the full tensor.
        origin: the shard's file, for messages.
    """

    @property
    def region(self) -> Region: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def origin(self) -> str: ...


AnyShard = TypeVar("AnyShard", bound=Shard)


class StoredShards(ABC, Generic[AnyShard]):
    """Shards of tensors, by the name of the full tensor. Values are read when a tensor is used."""

    def __init__(self) -> None:
        self._by_name: dict[str, list[AnyShard]] = {}  # name of the full tensor → its shards, from all ranks

    def add_shard(self, name: str, shard: AnyShard) -> None:
        """Add a shard of the tensor `name`."""
        self._by_name.setdefault(name, []).append(shard)

    @abstractmethod
    def _stored_values(self, shard: AnyShard) -> torch.Tensor:
        """Return the values of a shard in the form of `to_storable`, with the lengths of its region."""

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
                    f"the shards of {name!r} do not belong to a {dtype} tensor of shape {shape}: {shard.origin} has "
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
        # A dtype that is stored as a view of another dtype is assembled as this view.
        storable, original_dtype = to_storable(torch.empty(lengths_of(region), dtype=dtype_of(dtype)))
        for shard in self._by_name.get(name, []):
            copy_common(storable, region, self._stored_values(shard), shard.region, shape)
        return from_storable(storable, original_dtype)


@dataclass(frozen=True, slots=True)
class _StoredShard:
    """A shard on the disk.

    Attributes:
        tensor: name of the full tensor.
        region: the elements of the full tensor that the shard contains.
        file: the safetensors file.
        name: name of the shard in `file`.
        dtype: dtype of the full tensor, as a result of `dtype_name`.
        shape: shape of the full tensor.
    """

    tensor: str
    region: Region
    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def origin(self) -> str:
        return self.file.name


class ShardFiles(StoredShards[_StoredShard]):
    """The shards of a checkpoint's model or optimizers, by tensor name. Files are memory-mapped on first use.

    Args:
        folder: the checkpoint folder.
        part: name of the folder with the shards in `folder`.
        files: the files of the part that the manifest lists, with paths relative to `folder`.

    Raises:
        CheckpointError: an index is damaged or does not match its safetensors file.
    """

    def __init__(self, folder: Path, part: str, files: Iterable[str]) -> None:
        super().__init__()
        self._open: dict[Path, Any] = {}  # safetensors file → result of `safe_open`, which maps the file
        listed = set(files)
        for stem in numbered(listed, part, RANK_STEM):
            index = inside(folder, f"{stem}.json", str(folder))
            file = inside(folder, f"{stem}.safetensors", str(folder))
            # A rank without shards, such as one with a replica only, writes no safetensors file.
            header = read_header(file) if f"{stem}.safetensors" in listed else {}
            for shard in _read_index(index, file, header):
                self.add_shard(shard.tensor, shard)

    def _stored_values(self, shard: _StoredShard) -> torch.Tensor:
        """Return the stored values of a shard as a tensor that is mapped from the file."""
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
    """Return whether a shard fits into its full tensor and has the shape and dtype of its entry in the header."""
    if not fits(shard.region, shard.shape):
        return False
    example, _ = to_storable(torch.empty(0, dtype=dtype_of(shard.dtype)))
    pair_axis = example.shape[1:]  # (2,) for complex numbers, which are stored as pairs of reals
    stored_shape = (*lengths_of(shard.region), *pair_axis)
    return tuple(in_header["shape"]) == stored_shape and in_header["dtype"] == dtype_name(example.dtype)


def _integers(values: object) -> tuple[int, ...]:
    if not isinstance(values, list) or any(type(value) is not int or value < 0 for value in values):
        raise ValueError(f"{values!r} are not integers of at least 0")
    return tuple(values)


class SavedTensor(torch.Tensor):
    """A sharded tensor in a checkpoint. Each operation on the tensor reads the values from the files.

    The tensor has the full shape and the CPU as device. Operations return plain tensors. It is created by
    `StoredShards.find`.
    """

    _shards: StoredShards[Any]
    _name: str
    _dtype_name: str

    # torch creates wrapper subclasses, tensors without memory, only in `__new__`.
    @staticmethod
    def __new__(cls, shards: StoredShards[Any], name: str, shape: tuple[int, ...], dtype: str) -> SavedTensor:
        tensor: SavedTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype_of(dtype), device=torch.device("cpu")
        )
        tensor._shards = shards
        tensor._name = name
        tensor._dtype_name = dtype
        return tensor

    def __init__(self, shards: StoredShards[Any], name: str, shape: tuple[int, ...], dtype: str) -> None:
        super().__init__()

    def read(self, region: Region) -> torch.Tensor:
        """Read a region into a new plain tensor on the CPU (see `lengths_of` for its shape)."""
        return self._shards.read(self._name, tuple(self.shape), self._dtype_name, region)

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
