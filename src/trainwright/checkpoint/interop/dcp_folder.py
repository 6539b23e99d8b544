"""Sharded tensors of other programs, and folders of torch.distributed.checkpoint.

A folder of torch.distributed.checkpoint has files of consecutive `torch.save` archives, one for each block of a tensor,
and a pickle `.metadata` with the location of each block. The state dict is flattened in it:

    state dict   {"model": {"a": tensor of 4 rows}, "optimizer": {"param_groups": [{"lr": 0.1}]}}
    names        model.a                    optimizer.param_groups.0.lr
    paths        ("model", "a")             ("optimizer", "param_groups", 0, "lr")
    locations    model.a at (0,): bytes 0 to 500 of __0_0.distcp, model.a at (2,): bytes 0 to 500 of __1_0.distcp, ...

Pickles are parsed, never executed (see `torch_file`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from trainwright.checkpoint.disk.untrusted import inside, read_bytes, reading
from trainwright.checkpoint.format.regions import Box, Region, lengths_of
from trainwright.checkpoint.format.safetensors_io import dtype_name, to_storable
from trainwright.checkpoint.format.shard_files import SavedTensor, StoredShards, loaded
from trainwright.checkpoint.interop.pickle_parser import Placeholder, checked_size, checked_sizes, parse_pickle
from trainwright.checkpoint.interop.torch_file import MAX_PICKLE_BYTES, STORABLE_DTYPES, read_torch_file
from trainwright.core.errors import CheckpointError
from trainwright.core.tree import map_tensors

METADATA = ".metadata"
_TORCH = "torch.distributed.checkpoint"


class _Shard(NamedTuple):
    """One shard.

    Attributes:
        region: its location in the full tensor.
        read: function that returns its values, in any shape.
        dtype: result of `dtype_name`.
        shape: shape of the full tensor.
        origin: the file, for messages.
    """

    region: Region
    read: Callable[[], torch.Tensor]
    dtype: str
    shape: tuple[int, ...]
    origin: str = "another file"


class _Place(NamedTuple):
    """The location of a `torch.save` archive in a file, in bytes."""

    file: Path
    offset: int
    length: int


class ForeignShards(StoredShards[_Shard]):
    """Shards of tensors of another program. Values are read when a tensor is used."""

    def add(
        self, name: str, region: Region, shape: tuple[int, ...], dtype: torch.dtype, read: Callable[[], torch.Tensor]
    ) -> None:
        """Add the shard `region` of the tensor `name`, whose full shape is `shape`. `read` returns its values."""
        self.add_shard(name, _Shard(region, read, dtype_name(dtype), shape))

    def full(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, origin: Path) -> SavedTensor:
        """Return a full tensor, whose values are read on use.

        Raises a `CheckpointError` about `origin` if the added shards do not cover it, or overlap.
        """
        try:
            return self.find(name, shape, dtype_name(dtype))
        except CheckpointError as error:
            raise CheckpointError(f"{origin} is incomplete: {error}") from error

    def _stored_values(self, shard: _Shard) -> torch.Tensor:
        return to_storable(shard.read().reshape(lengths_of(shard.region)))[0]


@dataclass
class Sharded:
    """The content of a sharded checkpoint of another program. The values of sharded tensors are read on use.

    Attributes:
        source: the library that wrote the checkpoint.
        weights: the state dict of the model. Its tensors are `SavedTensor`s or tensors. Tied names have one object.
        optimizers: state dicts of torch optimizers, with parameter names or positions.
        step: number of completed optimizer steps, or None if unknown.
        schedulers: states of learning-rate schedules.
        progress: Lightning's file `meta.pt` with the values that are not sharded. Empty for other programs.
        notes: sentences about what was skipped.
    """

    source: Literal["torch.distributed", "deepspeed"]
    weights: Mapping[str, Any]
    optimizers: list[Any] = field(default_factory=list)
    step: int | None = None
    schedulers: list[Any] = field(default_factory=list)
    progress: Mapping[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def load(self) -> Sharded:
        """Join the shards of all sharded tensors in memory, and return this object. Tied tensors remain tied."""
        full: dict[int, torch.Tensor] = {}  # id of a tensor → its values

        # Tied names have one object. `==` of tensors compares elements, so that ids are the keys.
        def load_once(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in full:
                full[id(tensor)] = loaded(tensor)
            return full[id(tensor)]

        # The attributes are set after both are loaded: the sources must stay alive as long as their ids are keys.
        weights, optimizers = map_tensors(load_once, (self.weights, self.optimizers))
        self.weights = weights
        self.optimizers = optimizers
        return self


def read_dcp(folder: Path) -> dict[str, Any]:
    """Read a folder of torch.distributed.checkpoint as the nested state dict that was saved.

    Tensors are read on use. Raises a `CheckpointError` if a file is missing, is damaged, or contains anything except
    tensors and plain data.
    """
    path = folder / METADATA
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing, which is needed to read the folder. It is written last: the save was interrupted, or "
            "the copy is incomplete. Copy it, or use another checkpoint."
        )
    with reading(path, "is not metadata of torch.distributed.checkpoint"):
        data = read_bytes(path, max_bytes=MAX_PICKLE_BYTES)
        tree = parse_pickle(data, limit=MAX_PICKLE_BYTES, origin=str(path))[0]
        metadata = _Metadata(folder, tree)
        values: dict[tuple[str | int, ...], Any] = {}  # by path in the state dict
        for name, entry in metadata.entries.items():
            value_path = tuple(metadata.paths.get(name, (name,)))
            values[value_path] = metadata.value(name, entry)
        return _nested(values)


class _Metadata:
    """The parsed metadata: the structure of the state dict, and the location of each block.

    Attributes:
        entries: the metadata of each value, by its flattened name, such as `model.layers.0.weight`.
        paths: the keys and indices of each value in the nested state dict, by flattened name. A name without a path is
            a key of the state dict itself.
    """

    def __init__(self, folder: Path, tree: Any) -> None:
        self._folder = folder
        self._origin = folder / METADATA
        state = self._state(tree, "metadata.Metadata")
        self.entries: dict[str, Any] = state["state_dict_metadata"]
        self.paths: Mapping[str, Any] = state.get("planner_data") or {}
        self._shards = ForeignShards()
        self._sizes: dict[Path, int] = {}  # of files, in bytes
        # Flattened name and offsets of the block → place. Values that are not tensors have no offsets.
        self._places: dict[tuple[str, tuple[int, ...] | None], _Place] = {}
        for index, info in state["storage_data"].items():
            key = self._state(index, "metadata.MetadataIndex")
            offsets = None
            if key.get("offset") is not None:
                offsets = self._size(key["offset"])
            self._places[key["fqn"], offsets] = self._place(info)

    def value(self, name: str, entry: object) -> Any:
        """Return the value of an item of `entries`. Tensors are read on use. Call this method once for each name."""
        # torch pickles values that are not tensors, and stores no offsets for them.
        if isinstance(entry, Placeholder) and entry.name == f"{_TORCH}.metadata.BytesStorageMetadata":
            return self._read(self._places[name, None])
        state = self._state(entry, "metadata.TensorStorageMetadata")
        properties = self._state(state["properties"], "metadata.TensorProperties")
        # `TensorProperties.__getstate__` returns a tuple that begins with the dtype. Without it, the fields are a dict.
        named_dtype = properties[0] if isinstance(properties, tuple) else properties["dtype"]
        dtype = STORABLE_DTYPES.get(named_dtype.name) if isinstance(named_dtype, Placeholder) else None
        if dtype is None:
            raise CheckpointError(f"{self._origin}: the dtype of {name!r} is not supported.")
        shape = self._size(state["size"])
        for chunk in state["chunks"]:
            block = self._state(chunk, "metadata.ChunkStorageMetadata")
            region = Box(self._size(block["offsets"]), self._size(block["sizes"]))
            place = self._places.get((name, region.offsets))
            if place is None:
                raise CheckpointError(f"{self._origin} has no location for the block of {name!r} at {region.offsets}.")
            self._shards.add(name, region, shape, dtype, partial(self._tensor, place, dtype))
        return self._shards.full(name, shape, dtype, self._folder)

    def _tensor(self, place: _Place, dtype: torch.dtype) -> torch.Tensor:
        """Return the block of a tensor at a place."""
        tensor = self._read(place)
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != dtype:
            raise CheckpointError(f"{place.file} holds no {dtype} tensor at byte {place.offset}. It is damaged.")
        return tensor

    def _read(self, place: _Place) -> Any:
        """Return the content of the archive at a place: a block of a tensor, or another value."""
        tree, unknown = read_torch_file(place.file, span=(place.offset, place.length))
        if unknown:
            raise CheckpointError(
                f"{place.file} names {', '.join(unknown[:8])}, which is neither a tensor nor plain data. No code from "
                "the file was run. Save the state dict without it."
            )
        return tree

    def _place(self, info: object) -> _Place:
        """Return the place in a `_StorageInfo`, after checking that its file has these bytes."""
        state = self._state(info, "filesystem._StorageInfo")
        if state.get("transform_descriptors"):
            raise CheckpointError(f"{self._origin}: its files are compressed. Save them without extensions.")
        path = inside(self._folder, state["relative_path"], str(self._origin))
        if path not in self._sizes:
            if not path.is_file():
                raise CheckpointError(f"{path} is missing. Copy the files of every rank into the folder.")
            self._sizes[path] = path.stat().st_size
        offset = checked_size(state["offset"])
        length = checked_size(state["length"])
        if offset + length > self._sizes[path]:
            raise CheckpointError(
                f"{path} has {self._sizes[path]} bytes, expected at least {offset + length}: it is truncated. Copy it "
                "again, or use another checkpoint."
            )
        return _Place(path, offset, length)

    def _state(self, node: object, name: str) -> Any:
        """Return the pickled fields of an object, whose class must be `name` in torch.distributed.checkpoint."""
        expected = f"{_TORCH}.{name}"
        got = node.name if isinstance(node, Placeholder) else type(node).__name__
        if not isinstance(node, Placeholder) or got != expected:
            raise CheckpointError(
                f"{self._origin} contains {got}, expected {expected}. No code from the file was run. Save the state "
                "dict again with torch.distributed.checkpoint."
            )
        return node.state

    @staticmethod
    def _size(node: object) -> tuple[int, ...]:
        """Return the numbers of a `torch.Size`, which is a shape or offsets."""
        if not isinstance(node, Placeholder) or node.name != "torch.Size" or not node.args:
            raise ValueError("expected a torch.Size")
        return tuple(checked_sizes(node.args[0]))


def _nested(values: Mapping[tuple[str | int, ...], Any]) -> dict[str, Any]:
    """Return nested dicts and lists from values by path. Integers in a path are indices of a list.

    For example, `{("a", 0): x, ("a", 1): y, ("b",): z}` becomes `{"a": [x, y], "b": z}`.
    """
    # Lists are dicts with their indices as keys at first, because values may come in any order.
    root: dict[Any, Any] = {}
    for path, value in values.items():
        target = root
        for key in path[:-1]:
            target = target.setdefault(key, {})
        target[path[-1]] = value
    return {str(key): _with_lists(value) for key, value in root.items()}


def _with_lists(tree: object) -> Any:
    """Replace each dict whose keys are all integers by the list of its values in the order of the keys."""
    if type(tree) is not dict:
        return tree
    values = {key: _with_lists(value) for key, value in tree.items()}
    if values and all(type(key) is int for key in values):
        return [values[key] for key in sorted(values)]
    return values
