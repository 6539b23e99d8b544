"""Export of a checkpoint's weights for other programs: one safetensors file, or shards with an index.

Tensors are copied from file to file one at a time, so that only one tensor is in memory.

The source has one of three layouts: one safetensors file, safetensors shards with an index, or the shards that ranks
have saved, with a `state.json`.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from trainwright.checkpoint.disk.durable import hidden, make_folder, rename, sync_folder, write_file
from trainwright.checkpoint.disk.planned_file import Weight, write_files
from trainwright.checkpoint.disk.untrusted import inside, reading
from trainwright.checkpoint.format.codec import read_tree
from trainwright.checkpoint.format.layout import MANIFEST, MODEL_FOLDER, MODEL_STEM
from trainwright.checkpoint.format.manifests import read_manifest, verify
from trainwright.checkpoint.format.model import (
    MAX_SHARD_BYTES,
    MODEL_INDEX,
    SINGLE_FILE,
    deal_out,
    read_index,
    shard_index,
    shard_names,
)
from trainwright.checkpoint.format.safetensors_io import (
    NAMED_DTYPES,
    NATIVE_NAMES,
    dtype_name,
    plan_streamed,
    read_header,
    read_safetensors,
    to_storable,
)
from trainwright.checkpoint.format.shard_files import ShardFiles, loaded
from trainwright.core.errors import CheckpointError

Layout = Literal["single", "sharded"]

# The dtypes that floating-point tensors can be converted to.
EXPORT_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_STATE = f"{MODEL_STEM.rpartition('/')[2]}.json"  # of a sharded model, in its folder
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})  # not the 1-byte dtypes, whose values need scales
# Checkpoints store some dtypes as views of plain ones (see `to_storable`). Exports write the same bytes under the names
# that newer versions of the format have for these dtypes, such as "C64" for "torch.complex64".
_NATIVE = {str(dtype): name for dtype, name in NATIVE_NAMES.items()}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a model on the disk.

    Attributes:
        name: name in the state dict and in an export.
        file: the safetensors file with the tensor. For a model that ranks have saved as shards, its `state.json`, which
            is only used in messages.
        stored_as: name of the tensor in `file`. It differs from `name` only for the additional names of a tied tensor
            with `expand_tied`.
        dtype: name of the dtype in the safetensors format, such as `"F32"`.
        shape: shape of the tensor in the dtype `dtype`. A complex tensor whose `dtype` is that of its real and
            imaginary parts has a last dimension of 2.
        write_as: key of `EXPORT_DTYPES`, the dtype to convert to. None copies the bytes.
        value: the tensor, for a model that ranks have saved as shards. None for a tensor that `file` contains in full.
    """

    name: str
    file: Path
    stored_as: str
    dtype: str
    shape: tuple[int, ...]
    write_as: str | None = None
    value: torch.Tensor | None = None

    def read(self) -> torch.Tensor:
        """Return the tensor on the CPU, mapped from its file or assembled from shards.

        It has the dtype in which checkpoints store it: complex numbers are pairs of real numbers, and rare 1-byte
        floats are uint8 (see `to_storable`).
        """
        if self.value is not None:
            return to_storable(loaded(self.value))[0]
        return read_safetensors(self.file, names=[self.stored_as], copy=False)[self.stored_as]

    @property
    def like(self) -> torch.Tensor:
        """Meta tensor with the shape and dtype to write."""
        if self.write_as is None:
            dtype = NAMED_DTYPES.get(self.dtype)
        else:
            dtype = EXPORT_DTYPES[self.write_as]
        if dtype is None:
            raise CheckpointError(f"{self.name!r} in {self.file} has the dtype {self.dtype!r}, which torch lacks.")
        return torch.empty(self.shape, dtype=dtype, device="meta")

    @property
    def num_bytes(self) -> int:
        """Number of bytes to write."""
        return self.like.nbytes


@dataclass
class Exported:
    """The result of an export.

    Attributes:
        files: the written files. With `layout="sharded"`, the index is the last one.
        num_tensors: number of tensors in the files.
        num_bytes: total size of the tensors in the files.
        tied: tied names that were skipped, each with the name under which the tensor was written.
        left_out: stem of the source's files whose entries were skipped because they are not tensors, such as
            `"extra_state"`. Empty if all entries of the state dict are tensors.
    """

    files: list[Path]
    num_tensors: int
    num_bytes: int
    tied: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


@dataclass
class _Model:
    """The description of a model on the disk.

    Attributes:
        tensors: its tensors in order. A tied tensor is included once, under its first name.
        tied: further name of a tied tensor → first name.
        extra: see `Exported.left_out`.
    """

    tensors: list[StoredTensor]
    tied: dict[str, str]
    extra: list[str]


def export_weights(
    source: Path | str,
    target: Path | str,
    *,
    layout: Layout = "single",
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    expand_tied: bool = False,
    check: bool = True,
) -> Exported:
    """Write the weights of a checkpoint as safetensors files for other programs.

    Call this function on one process. Blocks on the disk. The files are written under a hidden name, which is changed
    to `target` once they are complete. After an error they are deleted.

    Args:
        source: a Trainwright checkpoint, its model folder, or a folder of Hugging Face safetensors.
        target: path to write, which must not exist: a file for `layout="single"`, a folder for `"sharded"`.
        layout: `"single"` for one safetensors file, or `"sharded"` for shards with `model.safetensors.index.json`.
            Default: `"single"`.
        dtype: `"fp32"`, `"fp16"` or `"bf16"` for all floating-point tensors except 1-byte dtypes. Default: None, which
            changes no dtype.
        max_shard_bytes: maximum total size of the tensors in one shard. A larger tensor gets its own shard.
            Default: 5 GB.
        expand_tied: write a tied weight under each of its names. Default: False, which writes it under the first name
            and stores `{other name: first name}` in the metadata, like `safetensors.torch.save_model`.
        check: first compare the hashes of the model's files with the checkpoint's manifest. False compares only their
            names and sizes. It has no effect if `source` has no manifest. Default: True.

    Raises:
        FileNotFoundError: `source` does not exist.
        CheckpointError: `source` is damaged or has no weights, `target` exists, `layout` or `dtype` is unknown, or
            safetensors cannot store a tensor.
    """
    source = Path(source)
    target = Path(target)
    if dtype is not None and dtype not in EXPORT_DTYPES:
        raise CheckpointError(f"dtype={dtype!r}, expected one of {', '.join(EXPORT_DTYPES)}.")
    if layout not in ("single", "sharded"):
        raise CheckpointError(f"layout={layout!r}, expected 'single' or 'sharded'.")
    if os.path.lexists(target):
        raise CheckpointError(f"{target} exists; it is not replaced. Choose another name.")
    model = _read_layout(_model_folder(source, check))
    tensors = list(model.tensors)
    tied = model.tied
    if expand_tied:
        by_name = {tensor.name: tensor for tensor in tensors}
        for name, first_name in tied.items():
            tensors.append(replace(by_name[first_name], name=name))
        tied = {}
    if dtype is not None:
        tensors = [replace(tensor, write_as=dtype) if tensor.dtype in _FLOATS else tensor for tensor in tensors]
    make_folder(target.parent)
    temporary = hidden(target, "tmp")
    try:
        if layout == "single":
            _write_file(temporary, tensors, tied)
            files = [target]
        else:
            names = _write_shards(temporary, tensors, tied, max_shard_bytes)
            files = [target / name for name in names]
        rename(temporary, target)
    except BaseException:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        temporary.unlink(missing_ok=True)
        raise
    return Exported(
        files=files,
        num_tensors=len(tensors),
        num_bytes=sum(tensor.num_bytes for tensor in tensors),
        tied=dict(tied),
        left_out=model.extra,
    )


def stored_tensors(source: Path | str) -> tuple[list[StoredTensor], dict[str, str]]:
    """Return the tensors of a checkpoint's model in order, and tied name → first name. Only headers are read.

    The dtypes and shapes are those of `StoredTensor.read`. `source` is as in `export_weights`. Hashes are not compared.
    """
    model = _read_layout(_model_folder(Path(source), check=False), native=False)
    return model.tensors, model.tied


def _model_folder(source: Path, check: bool) -> Path:
    """Return the folder with the model's files: `source`, or the model folder of the checkpoint `source`.

    The files of a checkpoint are compared with its manifest, including their hashes if `check` is True.
    """
    if any((source / name).is_file() for name in (MODEL_INDEX, SINGLE_FILE, _STATE)):
        return source
    manifest = read_manifest(source)
    if "model" not in manifest.parts:
        raise CheckpointError(f"{source} has no weights: its {MANIFEST} has no part 'model'.")
    problems = verify(source, hashes=check, parts=["model"])
    if problems:
        raise CheckpointError(f"{source} is damaged: {'; '.join(problems)}. Use another checkpoint.")
    return source / MODEL_FOLDER


def _read_layout(folder: Path, *, native: bool = True) -> _Model:
    """Read the headers of a model's files. The folder has one of the three layouts in the module's docstring.

    Args:
        folder: the model folder.
        native: describe tensors as an export contains them, such as "C64" with the shape (3,). False describes them as
            the files contain them, such as "F32" with the shape (3, 2).
    """
    with reading(folder):
        if (folder / _STATE).is_file():
            return _read_sharded(folder, native)
        if not (folder / MODEL_INDEX).is_file():
            single = inside(folder, SINGLE_FILE, str(folder))
            names = [name for name in read_header(single) if name != "__metadata__"]
            return _Model(tensors=_described(single, names, {}, native), tied={}, extra=[])
        index = read_index(folder / MODEL_INDEX)
        # The result has the order of the index, which differs from the order of the shards.
        by_name: dict[str, StoredTensor] = {}
        for shard, names in index.shards.items():
            for tensor in _described(shard, names, index.dtypes, native):
                by_name[tensor.name] = tensor
        extra = [] if index.extra is None else [index.extra]
        return _Model([by_name[name] for name in index.names], index.tied, extra)


def _read_sharded(folder: Path, native: bool) -> _Model:
    """Return the tensors of a model that ranks have saved as shards, including tensors that are not sharded."""
    stem = _STATE.removesuffix(".json")
    # All files in the folder are used; the index of a file from elsewhere would not match the tree.
    shards = ShardFiles(folder.parent, folder.name, [f"{folder.name}/{file.name}" for file in folder.iterdir()])
    tree = read_tree(folder, stem, copy=False, shards=functools.cache(shards.find))
    if not isinstance(tree, dict):
        raise CheckpointError(f"{folder / _STATE} holds a {type(tree).__name__}, expected a dictionary.")
    model = _Model([], {}, [])
    # `cache` returns one object for all names of a tied tensor. `tree` keeps the objects alive, so ids are unique.
    first_names: dict[int, str] = {}
    for name, value in tree.items():
        if not isinstance(value, torch.Tensor):
            # All entries that are not tensors are in one file.
            model.extra = [stem]
            continue
        first_name = first_names.setdefault(id(value), name)
        if first_name != name:
            model.tied[name] = first_name
            continue
        dtype = dtype_name(value.dtype)
        shape = tuple(value.shape)
        # `dtype_name` returns torch's name for a dtype that is stored as a view of a plain dtype.
        if dtype.startswith("torch."):
            if native:
                dtype = _native(name, dtype)
            else:
                stored = to_storable(torch.empty(shape, dtype=value.dtype))[0]
                dtype = dtype_name(stored.dtype)
                shape = tuple(stored.shape)
        model.tensors.append(StoredTensor(name, folder / _STATE, name, dtype, shape, value=value))
    return model


def _native(name: str, dtype: str) -> str:
    """Return the format's name of a dtype with a name such as "torch.complex64". `name` is the tensor's name."""
    if dtype not in _NATIVE:
        raise CheckpointError(f"{name!r} is {dtype}, which safetensors cannot store. Nothing was exported.")
    return _NATIVE[dtype]


def _described(file: Path, names: list[str], dtypes: Mapping[str, str], native: bool) -> list[StoredTensor]:
    """Return the tensors `names` of a file.

    `dtypes` has the original dtypes of the tensors that are stored as views, such as "torch.complex64".
    """
    header = read_header(file)
    tensors = []
    for name in names:
        if name not in header:
            raise CheckpointError(f"{file} has no tensor {name!r}.")
        dtype = str(header[name]["dtype"])
        shape = tuple(int(size) for size in header[name]["shape"])
        if native and name in dtypes:
            dtype = _native(name, dtypes[name])
            if dtype == "C64":  # stored as pairs of real numbers
                shape = shape[:-1]
        tensors.append(StoredTensor(name, file, name, dtype, shape))
    return tensors


def _write_shards(
    folder: Path, tensors: list[StoredTensor], tied: Mapping[str, str], max_shard_bytes: int
) -> list[Path]:
    """Write shards and their index into a new folder. Return the paths in the folder, with the index as the last."""
    sizes = {tensor.name: tensor.num_bytes for tensor in tensors}
    by_name = {tensor.name: tensor for tensor in tensors}
    shards = deal_out(sizes, max_shard_bytes)
    files = dict(zip(shard_names(len(shards)), shards, strict=True))
    make_folder(folder)
    for file, names in files.items():
        _write_file(folder / file, [by_name[name] for name in names], {})
    index = shard_index(sizes, files, {"tied": dict(tied)} if tied else {})
    write_file(folder / MODEL_INDEX, json.dumps(index, indent=2, ensure_ascii=False).encode() + b"\n")
    sync_folder(folder)
    return [*map(Path, files), Path(MODEL_INDEX)]


def _write_file(path: Path, tensors: list[StoredTensor], tied: Mapping[str, str]) -> None:
    weights = {tensor.name: Weight(tensor.like, partial(_converted, tensor)) for tensor in tensors}
    write_files(path.parent, [plan_streamed(path.name, weights, tied)])


def _converted(tensor: StoredTensor) -> Iterator[torch.Tensor]:
    """Yield the values to write. Without a conversion, the dtype may differ from that of `tensor.like`; see `read`."""
    value = tensor.read()
    if tensor.write_as is not None:
        value = value.to(EXPORT_DTYPES[tensor.write_as])
    yield value.contiguous()
