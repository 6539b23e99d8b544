"""Reading of `torch.save` files without running any code from them.

A `.pt`, `.bin` or `.ckpt` file is a zip archive with a pickle. Files of torch before 1.6 are several consecutive
pickles, followed by the storages. Unpickling calls every function that the pickle names.

This module only parses the pickle (see `pickle_parser`): each import and each call becomes an inert node. It then
converts nodes with known names (tensors, plain containers, numbers) to values, and all other nodes to `Unknown`. The
memory that a small file can use is limited. `torch.load(weights_only=True)` is not used, because a crafted file could
corrupt memory before torch 2.10 (CVE-2026-24747), and torch 2.9 is supported.

Tensors are mapped from the file by default, so that bytes are read on first use. When `torch.save` overwrites the file,
it truncates the file first, and accessing a mapping of a truncated file kills the process. Therefore copy tensors that
are used after the file may have changed.
"""

from __future__ import annotations

import io
import math
import pathlib
import re
import struct
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from trainwright.checkpoint.disk.untrusted import check_regular, shortened
from trainwright.checkpoint.interop.pickle_parser import (
    STORAGE,
    Name,
    Named,
    Node,
    Unknown,
    checked_key,
    checked_size,
    checked_sizes,
    length_of,
    parse_pickle,
)
from trainwright.core.errors import CheckpointError

MAX_PICKLE_BYTES = 128 * 2**20
# Limit on all values. Each counts once per reference; text also counts by its length.
MAX_VALUES = 8_000_000
_TEXT_OF_A_VALUE = 32  # characters that count as one value
# Views can repeat elements. The tensors of a file may have at most this many times its size.
_FILE_SIZES = 4
_FREE_BYTES = 16 * 2**20
_LOCAL_HEADER = struct.Struct("<26xHH")  # lengths of name and extra field, at the end of a local header

_FORMER_NUMBER = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the first pickle of torch before 1.6
_HEAD_BYTES = 32
_FORMER_VERSION = 1001

_Place = tuple[Any, int, int]  # of a storage: the bytes that contain it, its offset in them, and its length


def read_torch_file(
    path: pathlib.Path, *, mapped: bool = True, span: tuple[int, int] | None = None
) -> tuple[Any, list[str]]:
    """Read a file of `torch.save` as plain data. Nothing in it is executed or imported.

    Args:
        path: a file of `torch.save`, written on a little-endian machine, also by torch before 1.6.
        mapped: False reads every tensor into memory.
        span: first byte and length of a zip archive in the file. The archive is read into memory. Default: None, which
            reads the complete file.

    Returns:
        The tree, and the sorted names of unsupported objects. In the tree, such objects are `Unknown`, subclasses of
            dict are dicts, and parameters are tensors. Tensors are on the CPU. Tensors that shared a storage share
            memory. Writing to a mapped tensor does not change the file. The file must keep its length while mapped
            tensors are used.

    Raises:
        CheckpointError: the file has another format (a bare pickle, a TorchScript archive), is damaged, or has more
            than `MAX_VALUES` values or tensors much larger than the file.
    """
    check_regular(path)
    try:
        if span is not None:
            data: Any = np.fromfile(path, np.uint8, offset=span[0], count=span[1])
            with zipfile.ZipFile(io.BytesIO(data.data)) as archive:
                reader, tree = _read_archive(path, archive, data, mapped)
        elif zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                reader, tree = _read_archive(path, archive, _map(path), mapped)
        else:
            reader, tree = _read_former(path, mapped)
    except CheckpointError as error:
        if str(path) in str(error):
            raise
        raise CheckpointError(f"{path}: {error}") from error
    except (zipfile.BadZipFile, RecursionError, MemoryError, EOFError, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {shortened(error)}. It is damaged or not a file of torch.save."
        ) from error
    except Exception as error:  # the parser, numpy and torch raise various ones for crafted pickles
        raise CheckpointError(f"{path} is not a valid file of torch.save: {shortened(error)}.") from error
    return tree, sorted(reader.unknown)


def _map(path: pathlib.Path) -> Any:
    return np.memmap(path, dtype=np.uint8, mode="c")  # writing to a tensor does not change the file


def _read_archive(path: pathlib.Path, archive: zipfile.ZipFile, data: Any, mapped: bool) -> tuple[_Interpreter, Any]:
    """Read a zip archive, which has a pickle, and an entry for each storage."""
    entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    if "constants.pkl" in entries:
        raise CheckpointError(
            f"{path} is a TorchScript program, not a state dict. Load it with torch.jit.load and save its state_dict()."
        )
    order = entries.get("byteorder")
    if order is not None and archive.read(order) != b"little":
        raise CheckpointError(f"{path} was written on a big-endian machine, which is not supported.")
    info = entries.get("data.pkl")
    if info is None:
        raise CheckpointError(f"{path} is a zip archive without data.pkl: torch.save did not write it.")
    if info.file_size > MAX_PICKLE_BYTES:
        raise CheckpointError(f"{path}: its data.pkl has {info.file_size} bytes, the limit is {MAX_PICKLE_BYTES}.")

    def find(key: str) -> _Place:
        info = entries[f"data/{key}"]
        if info.compress_type != zipfile.ZIP_STORED:
            records.take(info.file_size)
            return np.frombuffer(bytearray(archive.read(info)), np.uint8), 0, info.file_size
        start = info.header_offset + _LOCAL_HEADER.size
        header = data[info.header_offset : start].tobytes()
        return data, start + sum(_LOCAL_HEADER.unpack(header)), info.file_size

    records = _Records(path, mapped, find)
    tree, _, _ = parse_pickle(archive.read(info), limit=MAX_PICKLE_BYTES, origin=str(path))
    reader = _Interpreter(records)
    return reader, reader.value(tree)


def _read_former(path: pathlib.Path, mapped: bool) -> tuple[_Interpreter, Any]:
    """Read a file of torch before 1.6.

    The file has five pickles: a magic number, a version, machine information, the tree, and the keys of the storages.
    The storages follow, each as the number of elements (8 bytes) and the elements.
    """
    with open(path, "rb") as file:
        if _FORMER_NUMBER not in file.read(_HEAD_BYTES):
            raise CheckpointError(
                f"{path} is neither an archive of torch.save nor in its format before 1.6: it is a bare pickle "
                "(pickle.dump, or torch before 0.1.10), or damaged. A bare pickle can only be executed. If you trust "
                "its author, load it with torch.load(…, weights_only=False) and save its tensors again."
            )
    data, end = _map(path), 0
    values: list[Any] = []
    storages: list[Node] = []
    for number in range(5):
        value, end, found = parse_pickle(data, end, limit=MAX_PICKLE_BYTES - end, origin=str(path))
        values.append(value)
        storages += found
        is_little = isinstance(value, dict) and value.get("little_endian") is True
        if number == 2 and (values[1] != _FORMER_VERSION or not is_little):
            raise CheckpointError(
                f"{path} does not have version {_FORMER_VERSION} of its format, or was not written on a little-endian "
                "machine."
            )
    kinds = {_key_of(node): _STORAGE_DTYPES[node.args[0][1].name] for node in storages}
    places: dict[str, _Place] = {}
    for key in values[4]:
        if not isinstance(key, str):
            raise ValueError(f"the key of a storage is a {type(key).__name__}")
        start = end + 8
        num_bytes = int.from_bytes(data[end:start].tobytes(), "little") * (kinds[key] or torch.uint8).itemsize
        places[key] = data, start, num_bytes
        end = start + num_bytes
        if end > len(data):
            raise CheckpointError(f"{path} is truncated: the storage {key!r} extends beyond its end.")
    reader = _Interpreter(_Records(path, mapped, places.__getitem__))
    return reader, reader.value(values[3])


class _Records:
    """The storages of a file by key, and the limit on the total size of tensors, relative to the file's size.

    Args:
        path: the file.
        mapped: False copies the storages.
        find: function that returns the location of a storage in the file.
    """

    def __init__(self, path: pathlib.Path, mapped: bool, find: Callable[[str], _Place]) -> None:
        self._path, self._mapped, self._find = path, mapped, find
        self._size = path.stat().st_size
        self._taken = 0

    def storage(self, key: str, dtype: torch.dtype, num: int) -> torch.Tensor:
        """Return the first `num` elements of a storage as a 1-D tensor."""
        data, start, size = self._find(key)
        need = num * dtype.itemsize
        if size < need:
            raise CheckpointError(f"{self._path}: the storage {key!r} has {size} bytes, expected {need}.")
        if start + need > len(data):
            raise CheckpointError(f"{self._path} is truncated: the storage {key!r} extends beyond its end.")
        if num == 0:
            return torch.empty(0, dtype=dtype)
        part = data[start : start + need]
        if not self._mapped or start % dtype.itemsize:  # elements must be aligned
            part = part.copy()
        return torch.frombuffer(part, dtype=dtype)

    def take(self, num_bytes: int) -> None:
        """Add bytes to the total size of tensors. Raise a `CheckpointError` if the total exceeds the limit."""
        self._taken += num_bytes
        limit = _FILE_SIZES * self._size + _FREE_BYTES
        if self._taken > limit:
            raise CheckpointError(
                f"{self._path} has {self._size} bytes, and its tensors have more than {limit}, the limit for a file of "
                "this size: they repeat elements. If you trust its author, save contiguous copies of its tensors."
            )


class _Interpreter:
    """An interpreter that converts nodes with supported names to values, and collects unsupported names."""

    def __init__(self, records: _Records) -> None:
        self.records = records
        self.unknown: set[str] = set()
        # id of a node or container → its value and the number of values in it. It preserves shared objects.
        self._made: dict[int, tuple[Any, int]] = {}
        self._open: set[int] = set()  # ids of the containers around the current value
        self._held: list[Any] = []  # keeps the objects whose ids are in `_made` alive
        self._count = 0  # number of values so far
        self._storages: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def value(self, value: Any) -> Any:
        """Return the value of a parsed object: a node, a container or a plain value.

        Raises:
            CheckpointError: a container contains itself, or there are too many values.
        """
        kind = type(value)
        if kind is Named:
            self._counted(1)
            return _REFERENCES[value.name] if value.name in _REFERENCES else self.unknown_of(value.name)
        if kind not in _SHARED:
            self._counted(1 + length_of(value) // _TEXT_OF_A_VALUE)
            return value
        known = self._made.get(id(value))
        if known is not None:
            self._counted(known[1])
            return known[0]
        if id(value) in self._open:
            raise CheckpointError("a container in the file contains itself. The file is damaged or malicious.")
        before = self._count
        self._counted(1)
        self._open.add(id(value))
        made: Any
        if kind is Node:
            maker = _MAKERS.get(value.name)
            made = self.unknown_of(value.name) if maker is None else maker(self, value)
        elif kind is dict:
            made = {self.value(key): self.value(item) for key, item in value.items()}
        else:
            made = kind(self.value(item) for item in value)
        self._open.discard(id(value))
        self._made[id(value)] = made, self._count - before
        self._held.append(value)
        return made

    def _counted(self, number: int) -> None:
        self._count += number
        if self._count > MAX_VALUES:
            raise CheckpointError(
                f"the file's pickle expands to more than {MAX_VALUES} values, the limit: it repeats containers, or has "
                "long lists. Save these as tensors."
            )

    def unknown_of(self, name: Name) -> Unknown:
        """Return the placeholder for an unsupported name, and collect the name."""
        self.unknown.add(".".join(name))
        return Unknown(".".join(name))

    def flat(self, node: Node, dtype: torch.dtype | None) -> torch.Tensor:
        """Return the 1-D tensor of a storage node. `dtype` is used if the storage is untyped."""
        key = _key_of(node)
        _, kind, _, _, num, *view = node.args[0]
        own = _STORAGE_DTYPES[kind.name]
        wanted = own or dtype
        if wanted is None:
            raise ValueError("a tensor without a dtype")
        # An untyped storage counts bytes.
        count = checked_size(num) if own is not None else checked_size(num) // wanted.itemsize
        if (key, wanted) not in self._storages:
            self._storages[key, wanted] = self.records.storage(key, wanted, count)
        flat = self._storages[key, wanted]
        if not view or view[0] is None:
            return flat
        _, start, length = view[0]  # torch before 0.4 pickled views of storages
        return flat[checked_size(start) : checked_size(start) + checked_size(length)]

    def tensor(self, node: Node) -> torch.Tensor:
        """Check that a storage contains all elements of a tensor, and build the tensor."""
        storage, offset, size, stride = node.args[:4]
        dtype = None
        if node.name[1] == "_rebuild_tensor_v3":
            dtype = _REFERENCES[node.args[6].name]
            metadata = node.args[7] if len(node.args) > 7 else None
        else:
            metadata = node.args[6] if len(node.args) > 6 else None
        flat = self.flat(storage, dtype)
        sizes, strides = checked_sizes(self.value(size)), checked_sizes(self.value(stride))
        if len(sizes) != len(strides):
            raise ValueError(f"a tensor of sizes {sizes} and strides {strides}")
        self.records.take(math.prod(sizes) * flat.itemsize)
        last = checked_size(offset) + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
        if math.prod(sizes) and last >= flat.numel():
            raise CheckpointError(
                f"a tensor of sizes {sizes} and strides {strides} at {offset} extends beyond its storage of "
                f"{flat.numel()} elements. The file is damaged or malicious."
            )
        if not math.prod(sizes):
            return torch.empty(sizes, dtype=flat.dtype)
        tensor = torch.as_strided(flat, sizes, strides, offset)
        # torch saves lazily conjugated or negated views with these flags.
        if isinstance(metadata, dict) and metadata.get("conj"):
            tensor = tensor.conj()
        return tensor._neg_view() if isinstance(metadata, dict) and metadata.get("neg") else tensor


def _key_of(node: object) -> str:
    """Return the key of a storage node."""
    if type(node) is not Node or node.name != STORAGE or type(node.args[0]) is not tuple:
        raise ValueError("a tensor without a storage")
    _, kind, key, *_ = node.args[0]
    if type(kind) is not Named or type(key) is not str:
        raise ValueError("a storage without a type and a key")
    return key


def _mapping(reader: _Interpreter, node: Node) -> dict[Any, Any]:
    given = reader.value(list(node.args))
    first = given[0] if given and node.name[1] != "defaultdict" else ()
    pairs = first.items() if isinstance(first, dict) else first
    items = [*pairs, *((reader.value(key), reader.value(value)) for key, value in node.pairs)]
    return {checked_key(key): value for key, value in items}


def _default_dict(reader: _Interpreter, node: Node) -> Any:
    factory = reader.value(node.args[0]) if node.args else None
    return Unknown(factory.name) if isinstance(factory, Unknown) else defaultdict(factory, _mapping(reader, node))


def _encoded(reader: _Interpreter, node: Node) -> bytes:
    text, codec = node.args
    if type(text) is not str or codec not in ("latin1", "latin-1"):
        raise ValueError("bytes in another encoding than latin1")
    return bytes(text, "latin1")


def _numpy_dtype(reader: _Interpreter, node: Node) -> np.dtype[Any]:
    name = node.args[0]
    if not isinstance(name, str) or not _NUMPY_DTYPE.fullmatch(name):  # np.dtype also parses structured types
        raise ValueError("a numpy array of an unsupported dtype")
    dtype = np.dtype(name)
    order = node.state[1] if node.state else "|"
    return np.dtype(f"{order}{dtype.str[1:]}") if order in ("<", ">") else dtype


def _numpy_scalar(reader: _Interpreter, node: Node) -> Any:
    dtype, data = (reader.value(value) for value in node.args)
    if len(data) != dtype.itemsize:
        raise ValueError(f"{len(data)} bytes for a {dtype}")
    return np.frombuffer(data, dtype)[0]


def _numpy_array(reader: _Interpreter, node: Node) -> Any:
    _, shape, dtype, fortran, data = (reader.value(value) for value in node.state)
    sizes = checked_sizes(shape)
    return np.frombuffer(data, dtype).reshape(sizes, order="F" if fortran else "C").copy()


_DTYPES = (
    "float64", "float32", "float16", "bfloat16", "complex32", "complex64", "complex128",
    "uint64", "uint32", "uint16", "uint8", "int64", "int32", "int16", "int8", "bool",
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
)  # fmt: skip
_BUILTINS: dict[str, Any] = {each.__name__: each for each in (int, float, str, bool, list, dict, set, tuple, bytes)}
_BUILTINS |= {"long": int, "unicode": str}
# The dtypes that tensors of a file may have.
STORABLE_DTYPES: dict[Name, torch.dtype] = {("torch", name): getattr(torch, name) for name in _DTYPES}
# The values of names that are not called.
_REFERENCES: dict[Name, Any] = STORABLE_DTYPES | {
    (module, name): value for name, value in _BUILTINS.items() for module in ("builtins", "__builtin__")
}
_STORAGE_DTYPES: dict[Name, torch.dtype | None] = {
    ("torch", f"{word}Storage"): dtype
    for word, dtype in {
        "Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16,
        "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
        "Bool": torch.bool, "ComplexDouble": torch.complex128, "ComplexFloat": torch.complex64,
    }.items()
} | {("torch.storage", "UntypedStorage"): None}  # fmt: skip

_SHARED = frozenset({Node, dict, list, tuple, set, frozenset})
_NUMPY_DTYPE = re.compile(r"[<>|=]?[biufc][0-9]{1,2}")


def _subclass(reader: _Interpreter, node: Node) -> Any:
    """Interpret a tensor that was saved as a Parameter or with attributes. The attributes are skipped."""
    rebuild, kind, args, _ = node.args
    plain = type(kind) is Named and kind.name in (("torch", "Tensor"), ("torch.nn.parameter", "Parameter"))
    if type(rebuild) is not Named or type(args) is not tuple:
        raise ValueError("a tensor subclass that no function builds")
    known = rebuild.name[0] == "torch._utils" and rebuild.name[1] in ("_rebuild_tensor_v2", "_rebuild_parameter")
    if not plain or not known:
        return reader.unknown_of(kind.name if type(kind) is Named and not plain else rebuild.name)
    return reader.value(Node(rebuild.name, args))


_Maker = Callable[[_Interpreter, Node], Any]
_MAKERS: dict[Name, _Maker] = {
    ("torch._utils", "_rebuild_tensor_v2"): _Interpreter.tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _Interpreter.tensor,
    ("torch._utils", "_rebuild_parameter"): lambda reader, node: reader.value(node.args[0]),
    ("torch._tensor", "_rebuild_from_type_v2"): _subclass,
    ("torch", "Size"): lambda reader, node: torch.Size(checked_sizes(reader.value(node.args[0]))),
    ("torch", "device"): lambda reader, node: torch.device(*reader.value(node.args)),
    ("collections", "OrderedDict"): _mapping,
    ("collections", "defaultdict"): _default_dict,
    ("collections", "Counter"): lambda reader, node: Counter(_mapping(reader, node)),
    ("argparse", "Namespace"): lambda reader, node: reader.value(node.state or {}),
    ("_codecs", "encode"): _encoded,
    ("numpy", "dtype"): _numpy_dtype,
}
for _module in ("builtins", "__builtin__"):
    _MAKERS[_module, "set"] = lambda reader, node: (
        set(map(checked_key, reader.value(node.args[0]))) if node.args else set()
    )
    _MAKERS[_module, "frozenset"] = lambda reader, node: (
        frozenset(map(checked_key, reader.value(node.args[0]))) if node.args else set()
    )
    _MAKERS[_module, "complex"] = lambda reader, node: complex(*(float(number) for number in node.args))
    _MAKERS[_module, "bytes"] = lambda reader, node: b""  # how protocol 2 writes empty bytes
for _module in ("numpy.core.multiarray", "numpy._core.multiarray"):
    _MAKERS[_module, "scalar"] = _numpy_scalar
    _MAKERS[_module, "_reconstruct"] = _numpy_array
for _module in ("pathlib", "pathlib._local"):
    for _name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"):
        _MAKERS[_module, _name] = lambda reader, node: pathlib.Path(*reader.value(node.args))
for _package in ("lightning.fabric", "lightning_fabric"):
    _MAKERS[f"{_package}.utilities.data", "AttributeDict"] = _mapping
for _package in ("lightning.pytorch", "pytorch_lightning"):
    _MAKERS[f"{_package}.utilities.parsing", "AttributeDict"] = _mapping
