"""Planning of safetensors files, and checked reading. `write_files` writes a planned file and computes its hash.

The format (huggingface/safetensors, "Format"): 8 bytes little-endian header length, a JSON header
`{name: {dtype, shape, data_offsets}, "__metadata__": {text: text}}` padded with spaces, then the tensors' bytes
without gaps. The library's `save_file` computes no hash and does not sync, and its `save` builds the file in memory.
"""

from __future__ import annotations

import math
import os
import struct
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from trainwright.checkpoint.disk.durable import DIRECT_FROM_BYTES, DISK_BLOCK_BYTES, FileEntry
from trainwright.checkpoint.disk.planned_file import PlannedFile, Weight, write_files
from trainwright.checkpoint.disk.untrusted import check_json_size, check_regular, dump_json, load_json, reading
from trainwright.core.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_ALIGNMENT = 8
_LENGTH_BYTES = 8  # of the header length at the start of the file

# The dtypes that every safetensors since 0.5 can read; `to_storable` converts other dtypes to these.
_DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}  # by name in the format
# Dtypes that only newer readers support. Checkpoints store them as views of plain dtypes; exports use these names.
NATIVE_NAMES: dict[torch.dtype, str] = {
    torch.complex64: "C64",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
}
NAMED_DTYPES = DTYPES | {name: dtype for dtype, name in NATIVE_NAMES.items()}
# The dtypes that `to_storable` converts. Complex dtype → dtype of its real and imaginary parts.
_COMPLEX = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
# One byte each, so that a view as uint8 keeps the shape.
_AS_BYTES = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2)
_CONVERTED = {str(dtype): dtype for dtype in (*_COMPLEX, *_AS_BYTES)}  # by torch's name, such as "torch.complex64"
_DTYPE_OF_NAME = DTYPES | _CONVERTED  # by result of `dtype_name`


def dtype_name(dtype: torch.dtype) -> str:
    """Return the safetensors name of a dtype, such as `"F32"`. For a dtype that `to_storable` converts, return torch's
    name, such as `"torch.complex64"`. Any other dtype raises `CheckpointError`.
    """
    name = _DTYPE_NAMES.get(dtype, str(dtype))
    if name not in _DTYPE_OF_NAME:
        raise _unsupported(dtype)
    return name


def _unsupported(dtype: torch.dtype) -> CheckpointError:
    return CheckpointError(
        f"the dtype {dtype} is not supported in checkpoints. Convert the tensor, for example to torch.uint8."
    )


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype for a result of `dtype_name`. Other names raise `CheckpointError`."""
    if name not in _DTYPE_OF_NAME:
        raise CheckpointError(f"{name!r} is not a dtype that a checkpoint can hold.")
    return _DTYPE_OF_NAME[name]


def to_storable(tensor: torch.Tensor) -> tuple[torch.Tensor, str | None]:
    """Return a tensor that safetensors can store, and the name of the original dtype if it had to be converted.

    Complex numbers are viewed as pairs of reals (a last dimension of 2), rare 1-byte floats as uint8:

        float32, shape (3,) → the detached tensor, None
        complex64, shape (3,) → float32, shape (3, 2), "torch.complex64"
        float8_e8m0fnu, shape (3,) → uint8, shape (3,), "torch.float8_e8m0fnu"

    No bytes are copied, except for conjugated or negated views of complex numbers. Tensors without plain bytes
    (quantized, sparse, meta, DTensors, ...) raise `CheckpointError`.
    """
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise CheckpointError(f"a {type(tensor).__name__} wraps other tensors; gather it into a plain tensor first.")
    tensor = tensor.detach()
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested or tensor.is_quantized:
        if tensor.is_quantized:
            kind = "quantized"
        else:
            kind = "meta" if tensor.is_meta else str(tensor.layout)
        raise CheckpointError(
            f"a {kind} tensor has no plain bytes to save. Keep it dense, or use persistent=False for a buffer."
        )
    if tensor.dtype in _DTYPE_NAMES:
        return tensor, None
    if tensor.dtype in _COMPLEX:
        return torch.view_as_real(tensor.resolve_conj().resolve_neg()), str(tensor.dtype)
    if tensor.dtype in _AS_BYTES:
        return tensor.view(torch.uint8), str(tensor.dtype)
    raise _unsupported(tensor.dtype)


def from_storable(tensor: torch.Tensor, dtype: str | None) -> torch.Tensor:
    """Return the original tensor for the two results of `to_storable`."""
    if dtype is None:
        return tensor
    original = _CONVERTED.get(dtype)
    is_pairs = tensor.dim() > 0 and tensor.shape[-1] == 2
    if original in _COMPLEX and tensor.dtype is _COMPLEX[original] and is_pairs:
        return torch.view_as_complex(tensor)
    if original in _AS_BYTES and tensor.dtype is torch.uint8:
        return tensor.view(original)
    raise CheckpointError(f"a stored {tensor.dtype} tensor of shape {tuple(tensor.shape)} cannot be read as {dtype}.")


def plan_safetensors(
    path: str,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
    *,
    native: bool = False,
) -> PlannedFile:
    """Plan a safetensors file: its header and the order of its tensors. Copies and writes nothing.

    Args:
        path: path of the file, relative to the checkpoint folder.
        tensors: tensors by name, on any device. The memory of tied tensors is written once for each name.
        metadata: further metadata for the header. The header always contains `{"format": "pt"}`, which transformers
            needs.
        native: also accept the dtypes in `NATIVE_NAMES`, which only newer readers support. Default: False.

    Raises:
        CheckpointError: a dtype or a name cannot be stored, or there are too many tensors for the header.
    """
    if sys.byteorder != "little":
        raise CheckpointError("safetensors files are little-endian; saving on a big-endian machine is not supported.")
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    file = path.rpartition("/")[2]
    known = _DTYPE_NAMES | NATIVE_NAMES if native else _DTYPE_NAMES
    # Widest first, so that every tensor is aligned to its element size without gaps.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    offset = 0
    for name in names:
        tensor = tensors[name]
        if name == "__metadata__" or tensor.dtype not in known:
            raise CheckpointError(f"{file}: {name!r} of {tensor.dtype} cannot be stored in a safetensors file.")
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": known[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    encoded = dump_json(header).encode()
    # The tensors of a large file begin at a disk block, so that `LowPriorityFile` can write them with O_DIRECT.
    alignment = DISK_BLOCK_BYTES if offset >= DIRECT_FROM_BYTES else _ALIGNMENT
    # Spaces up to the next multiple: a header of 100 bytes ends at byte 108, and gets 4 of them for an alignment of 8.
    encoded += b" " * (-(len(encoded) + _LENGTH_BYTES) % alignment)
    if len(encoded) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{file}: {len(names)} tensors need a header of {len(encoded)} bytes; readers accept "
            f"{MAX_HEADER_BYTES}. Lower max_shard_bytes, or store fewer and larger tensors."
        )
    check_json_size(encoded, f"the header of {file}")
    return PlannedFile(path, struct.pack("<Q", len(encoded)) + encoded, [tensors[name] for name in names])


def plan_streamed(path: str, weights: Mapping[str, Weight], metadata: Mapping[str, str] | None = None) -> PlannedFile:
    """Plan a safetensors file whose tensors are read one at a time while the file is written.

    See `plan_safetensors` with `native=True` for the arguments and errors.
    """
    meta_tensors = {name: weight.like for name, weight in weights.items()}
    planned = plan_safetensors(path, meta_tensors, metadata, native=True)
    # The plan has the meta tensors in another order and without their names. Tensors as keys are compared as objects.
    weight_of = {weight.like: weight for weight in weights.values()}
    streamed = [weight_of[meta_tensor] for meta_tensor in planned.tensors]
    return PlannedFile(path, planned.head, streamed=streamed)


def write_safetensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> FileEntry:
    """Write a new safetensors file and return its size and hash. Blocks until the file is synced.

    Tensors are copied to the host one at a time. See `plan_safetensors` for the arguments and errors.
    """
    planned = plan_safetensors(path.name, tensors, metadata)
    return write_files(path.parent, [planned])[planned.path]


def read_header(path: Path) -> dict[str, Any]:
    """Return the JSON header of a safetensors file. A header that does not fit the file raises a CheckpointError."""
    check_regular(path)
    with reading(path), open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(_LENGTH_BYTES)
        # -1 for a file of less than 8 bytes. The shortest header is "{}".
        length = int.from_bytes(prefix, "little") if len(prefix) == _LENGTH_BYTES else -1
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - _LENGTH_BYTES):
            raise CheckpointError(
                f"{path} is not a safetensors file: {size} bytes with a header of {length}. It is truncated, damaged, "
                "or has another format, such as torch.save's."
            )
        header = load_json(file.read(length), str(path))
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: its header is a {type(header).__name__}, expected an object.")
    with reading(path, "has a header that does not match its content"):
        _check_offsets(header, size - _LENGTH_BYTES - length)
    return header


def _check_offsets(header: Mapping[str, Any], num_bytes: int) -> None:
    """Check that the tensors fill the `num_bytes` after the header without gaps, and have the sizes of their shapes.

    A header of an unexpected form raises any exception, which `read_header` converts.
    """
    metadata = header.get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError(f"__metadata__ is {metadata!r}, expected texts by name")
    entries = [entry for name, entry in header.items() if name != "__metadata__"]
    end = 0  # of the previous tensor
    for entry in sorted(entries, key=lambda entry: tuple(entry["data_offsets"])):
        begin, stop = entry["data_offsets"]
        numbers = (begin, stop, *entry["shape"])
        has_counts = all(type(number) is int and number >= 0 for number in numbers)
        if not has_counts or begin != end:
            raise ValueError(f"the entry {entry} is invalid at byte {end}")
        dtype = NAMED_DTYPES.get(entry["dtype"])  # None for a dtype that another library has written
        if dtype is not None and stop - begin != math.prod(entry["shape"]) * dtype.itemsize:
            raise ValueError(f"{entry} has {stop - begin} bytes")
        end = stop
    if end != num_bytes:
        cause = "it is truncated: " if end > num_bytes else ""
        raise ValueError(f"{cause}its tensors have {end} bytes, and {num_bytes} follow the header")


def read_safetensors(
    path: Path, *, device: torch.device | str = "cpu", names: Iterable[str] | None = None, copy: bool = True
) -> dict[str, torch.Tensor]:
    """Read tensors from a safetensors file.

    Args:
        path: path of the file.
        device: device of the tensors.
        names: names of the tensors to read. Default: all.
        copy: False maps CPU tensors from the file, so that values are read on first use. Use it for values that are
            copied soon. Writing to such a tensor does not change the file. Default: True.

    Raises:
        CheckpointError: the file is missing, damaged or has another format, or has no tensor of a name in `names`.
    """
    header = read_header(path)
    if names is None:
        chosen = [name for name in header if name != "__metadata__"]
    else:
        chosen = list(names)
    for name in chosen:
        if name not in header:
            raise CheckpointError(f"{path} has no tensor {name!r}.")
    with reading(path), safe_open(path, framework="pt", device=str(device)) as file:
        tensors = {name: file.get_tensor(name) for name in chosen}
    if copy and torch.device(device).type == "cpu":
        # safe_open maps the file. A tensor that stays mapped changes with the file, or crashes if it is truncated.
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    return tensors
