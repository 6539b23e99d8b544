"""Files of a checkpoint's pieces: `rank-00000.json` is the index of the pieces in `rank-00000.safetensors`."""

from __future__ import annotations

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
from trainwright.checkpoint.format.pieces import (
    Box,
    Pieces,
    Region,
    Span,
    copy_common,
    fits,
    lengths_of,
    num_elements,
    overlap,
    whole_region,
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


def plan_pieces(folder: str, rank: int, pieces: Mapping[str, Pieces]) -> list[PlannedFile]:
    """Plan the files for the shards of a part's tensors that `rank` holds, in `folder`; copies and writes nothing."""
    stem = f"{folder}/{RANK_STEM}-{rank:05d}"
    entries: list[dict[str, Any]] = []
    tensors: dict[str, torch.Tensor] = {}
    for name, full in pieces.items():
        for region, values in full.held:
            if not num_elements(region):
                continue
            if tuple(values.shape) != lengths_of(region) or not fits(region, full.shape):
                raise CheckpointError(f"{name}: values of shape {tuple(values.shape)} are not {region} of the whole.")
            stored = add_named(tensors, to_storable(values)[0], name)
            kind = {"dtype": dtype_name(full.dtype), "shape": list(full.shape)}
            entries.append({"tensor": name, "stored": stored, **kind, **_words(region)})
    return plan_pair(stem, {"pieces": entries}, tensors)


def _words(region: Region) -> dict[str, Any]:
    if isinstance(region, Span):
        return {"start": region.start, "stop": region.stop}
    return {"offsets": list(region.offsets), "lengths": list(region.lengths)}


@dataclass(frozen=True, slots=True)
class _Stored:
    """A piece on the disk: of which tensor, which region of it, where; and dtype and shape of the whole."""

    tensor: str
    region: Region
    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]


class PieceFiles:
    """The shards of one part of a checkpoint, found by the names of their tensors.

    The files are mapped: only the values that are used are read.

    Args:
        folder: the checkpoint.
        part: the folder of the part within it.
        files: those that the manifest lists for the part.
    """

    def __init__(self, folder: Path, part: str, files: Iterable[str]) -> None:
        self._by_name: dict[str, list[_Stored]] = {}
        self._open: dict[Path, Any] = {}
        listed = set(files)
        for stem in numbered(listed, part, RANK_STEM):
            index, file = (inside(folder, f"{stem}.{end}", str(folder)) for end in ("json", "safetensors"))
            header = read_header(file) if f"{stem}.safetensors" in listed else {}
            for piece in _read_index(index, file, header):
                self._by_name.setdefault(piece.tensor, []).append(piece)

    def find(self, name: str, shape: tuple[int, ...], dtype: str) -> SavedTensor:
        """Return a tensor of a full shape and dtype (the format's name) that is read when it is used.

        Raises:
            CheckpointError: shards are missing, overlap, or belong to another tensor.
        """
        found = self._by_name.get(name, [])
        if any(piece.shape != shape or piece.dtype != dtype for piece in found):
            raise CheckpointError(f"the pieces of {name!r} are not those of a {dtype} tensor of shape {shape}.")
        regions = [piece.region for piece in found]
        held, wanted = sum(map(num_elements, regions)), num_elements(whole_region(shape))
        if held != wanted or overlap(regions, shape):
            raise CheckpointError(
                f"the pieces of {name!r} hold {held} of its {wanted} elements, or some of them twice: those of a rank "
                "are missing or of another checkpoint."
            )
        return SavedTensor(self, name, shape, dtype)

    def read(self, name: str, shape: tuple[int, ...], dtype: str, region: Region) -> torch.Tensor:
        """Return a region of a tensor in new memory on the host; reads the parts of the pieces that lie in it."""
        true = dtype_of(dtype)
        # What is kept as a view of another dtype is put together as that.
        made, special = to_storable(torch.empty(lengths_of(region), dtype=true))
        for piece in self._by_name.get(name, []):
            copy_common(made, region, self._mapped(piece), piece.region, shape)
        return from_storable(made, special)

    def _mapped(self, piece: _Stored) -> torch.Tensor:
        with reading(piece.file):
            if piece.file not in self._open:
                self._open[piece.file] = safe_open(piece.file, framework="pt", device="cpu")
            found: torch.Tensor = self._open[piece.file].get_tensor(piece.name)  # mapped, not copied
        return found


def _read_index(path: Path, file: Path, header: Mapping[str, Any]) -> list[_Stored]:
    """Return the pieces that an index lists, each compared with the header of the file beside it."""
    found = []
    with reading(path, f"is no index of the pieces in {file.name}"):
        for entry in read_json(path)["pieces"]:
            shape, dtype = _whole_numbers(entry["shape"]), str(entry["dtype"])
            region: Region
            if "start" in entry:
                region = Span(*_whole_numbers([entry["start"], entry["stop"]]))
            else:
                region = Box(_whole_numbers(entry["offsets"]), _whole_numbers(entry["lengths"]))
            stored, _ = to_storable(torch.empty(0, dtype=dtype_of(dtype)))
            there, extra = header[str(entry["stored"])], (2,) if stored.dim() > 1 else ()
            if (
                not fits(region, shape)
                or tuple(there["shape"]) != (*lengths_of(region), *extra)
                or there["dtype"] != dtype_name(stored.dtype)
            ):
                raise CheckpointError(f"{path}: the piece {entry['stored']!r} is not what {file} holds.")
            found.append(_Stored(str(entry["tensor"]), region, file, str(entry["stored"]), dtype, shape))
    return found


def _whole_numbers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or any(type(value) is not int or value < 0 for value in values):
        raise ValueError(f"{values!r} are no whole numbers")
    return tuple(values)


class SavedTensor(torch.Tensor):
    """A tensor stored in pieces in a checkpoint. Each operation on it reads the values from the files.

    It has a shape and a dtype and is on the host. Results of operations are plain tensors. Created by `PieceFiles`.
    """

    _files: PieceFiles
    _name: str
    _dtype_name: str

    @staticmethod
    def __new__(cls, files: PieceFiles, name: str, shape: tuple[int, ...], dtype: str) -> SavedTensor:
        made: SavedTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype_of(dtype), device=torch.device("cpu")
        )
        made._files, made._name, made._dtype_name = files, name, dtype
        return made

    def __init__(self, files: PieceFiles, name: str, shape: tuple[int, ...], dtype: str) -> None:
        super().__init__()

    def read(self, region: Region) -> torch.Tensor:
        """Return a region as a plain tensor on the host, in memory of its own (see `lengths_of` for its shape)."""
        return self._files.read(self._name, tuple(self.shape), self._dtype_name, region)

    def load(self) -> torch.Tensor:
        """Return all of it as a plain tensor on the host, in memory of its own."""
        return self.read(whole_region(tuple(self.shape)))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's has no types
        return f"SavedTensor({self._name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    # These do not go through `__torch_dispatch__`, and would access memory that does not exist.

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied: torch.Tensor = memo.setdefault(id(self), self.load())
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.load().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # torch has no types here

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array."""
        return self.load().numpy(force=force)

    def tolist(self) -> Any:
        """Return the values as nested lists."""
        return self.load().tolist()

    # What torch documents for such classes, whose types are stricter in its stubs.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(SavedTensor, SavedTensor.load, (args, kwargs or {}))
        return func(*args, **kwargs)


def loaded(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor in memory; a tensor that is not a `SavedTensor` is returned as it is."""
    return tensor.load() if isinstance(tensor, SavedTensor) else tensor
