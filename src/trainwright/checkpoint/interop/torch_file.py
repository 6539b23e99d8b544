"""Reading of `torch.save` files without running any code from them.

A `.pt`, `.bin` or `.ckpt` file is a zip archive with a pickle. Files of torch before 1.6 are several consecutive
pickles, followed by the storages. Unpickling calls every function that the pickle names.

This module reads a file in two passes. `pickle_parser` parses the pickle: each import and each call becomes a
placeholder. `_Interpreter` then replaces placeholders with known names (tensors, plain containers, numbers) by values;
`_REFERENCES` and `_CALLS` at the end of this file list these names. Other placeholders and their arguments remain as
they are, so that they can be skipped even if they contain something that cannot be read.

The memory that a small file can use is limited. `torch.load(weights_only=True)` limits neither memory nor time, and a
crafted file could corrupt memory before torch 2.10 (CVE-2026-24747); torch 2.9 is supported.

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
from typing import Any, NamedTuple

import numpy as np
import torch

from trainwright.checkpoint.disk.untrusted import check_regular, shortened
from trainwright.checkpoint.interop.pickle_parser import (
    STORAGE,
    Placeholder,
    checked_key,
    checked_size,
    checked_sizes,
    parse_pickle,
)
from trainwright.core.errors import CheckpointError

MAX_PICKLE_BYTES = 128 * 2**20
# Limit on all values. A further reference to an object counts all values in it again. Text, bytes and long integers
# count one more for each 32 characters or bytes.
MAX_VALUES = 8_000_000
_CHARACTERS_PER_VALUE = 32
# Views can repeat elements. A file of 1 GiB may have tensors with 4 GiB + 16 MiB in total.
_MAX_TIMES_FILE_SIZE = 4
_ADDITIONAL_BYTES = 16 * 2**20
# The last fields of the header of a zip entry: the lengths of the name and of the extra field, which follow the header.
_LOCAL_HEADER = struct.Struct("<26xHH")

# The first pickle of a file of torch before 1.6: its magic number 0x1950a86a20f9469cfc6c.
_LEGACY_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_LEGACY_MAGIC_END = 32  # bytes at the beginning of the file that contain it
_LEGACY_VERSION = 1001


class _Place(NamedTuple):
    """The location of a storage: `num_bytes` from the offset `start` of `data`, a 1-D uint8 array."""

    data: Any
    start: int
    num_bytes: int


def read_torch_file(
    path: pathlib.Path, *, mapped: bool = True, span: tuple[int, int] | None = None
) -> tuple[Any, list[str]]:
    """Read a file of `torch.save` as plain data. Nothing in it is executed or imported.

    Args:
        path: a file of `torch.save`, written on a little-endian machine, also by torch before 1.6.
        mapped: False copies every tensor into memory. Default: True.
        span: first byte and length of a zip archive in the file. The archive is read into memory. Default: None, which
            reads the complete file.

    Returns:
        The tree, and the sorted names of unsupported objects. In the tree, such objects are placeholders, parameters
            are tensors, and OrderedDicts, Lightning's AttributeDicts and Namespaces are dicts. Tensors are on the CPU.
            Tensors that shared a storage share memory. Writing to a mapped tensor does not change the file. The file
            must keep its length while mapped tensors are used.

    Raises:
        CheckpointError: the file is missing, has another format (a bare pickle, a TorchScript archive), is damaged, or
            has more than `MAX_VALUES` values, a pickle of more than `MAX_PICKLE_BYTES`, or tensors much larger than
            the file.
    """
    check_regular(path)
    try:
        if span is not None:
            offset, length = span
            data: Any = np.fromfile(path, np.uint8, offset=offset, count=length)
            with zipfile.ZipFile(io.BytesIO(data.data)) as archive:
                reader, tree = _read_archive(path, archive, data, mapped)
        elif zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                reader, tree = _read_archive(path, archive, _map(path), mapped)
        else:
            reader, tree = _read_legacy(path, mapped)
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
    # All entries are in one folder, whose name varies: `archive/data.pkl`, `archive/data/0`, ...
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
            # The decompressed storage counts before it is allocated. `storages` is assigned below, before any call.
            storages.count_bytes(info.file_size)
            return _Place(np.frombuffer(bytearray(archive.read(info)), np.uint8), 0, info.file_size)
        header_end = info.header_offset + _LOCAL_HEADER.size
        header = data[info.header_offset : header_end].tobytes()
        name_length, extra_length = _LOCAL_HEADER.unpack(header)
        return _Place(data, header_end + name_length + extra_length, info.file_size)

    storages = _Storages(path, mapped, find)
    tree, _, _ = parse_pickle(archive.read(info), limit=MAX_PICKLE_BYTES, origin=str(path))
    reader = _Interpreter(storages)
    return reader, reader.value(tree)


def _read_legacy(path: pathlib.Path, mapped: bool) -> tuple[_Interpreter, Any]:
    """Read a file of torch before 1.6.

    The file has five pickles: a magic number, a version, machine information, the tree, and the keys of the storages.
    The storages follow in the order of the keys, each as the number of elements (8 bytes) and the elements.
    """
    with open(path, "rb") as file:
        if _LEGACY_MAGIC not in file.read(_LEGACY_MAGIC_END):
            raise CheckpointError(
                f"{path} is neither an archive of torch.save nor in its format before 1.6: it is a bare pickle "
                "(pickle.dump, or torch before 0.1.10), or damaged. A bare pickle can only be executed. If you trust "
                "its author, load it with torch.load(…, weights_only=False) and save its tensors again."
            )
    data = _map(path)
    origin = str(path)
    # `end` is the offset after what has been read. The limit is for all five pickles together.
    _magic, end, _ = parse_pickle(data, limit=MAX_PICKLE_BYTES, origin=origin)
    version, end, _ = parse_pickle(data, end, limit=MAX_PICKLE_BYTES - end, origin=origin)
    machine, end, _ = parse_pickle(data, end, limit=MAX_PICKLE_BYTES - end, origin=origin)
    is_little_endian = isinstance(machine, dict) and machine.get("little_endian") is True
    if version != _LEGACY_VERSION or not is_little_endian:
        raise CheckpointError(
            f"{path} does not have version {_LEGACY_VERSION} of its format, or was not written on a little-endian "
            "machine."
        )
    tree, end, storages = parse_pickle(data, end, limit=MAX_PICKLE_BYTES - end, origin=origin)
    keys, end, _ = parse_pickle(data, end, limit=MAX_PICKLE_BYTES - end, origin=origin)
    dtypes: dict[str, torch.dtype | None] = {}
    for placeholder in storages:
        storage = _StorageReference.of(placeholder)
        dtypes[storage.key] = _STORAGE_DTYPES[storage.class_name]
    places: dict[str, _Place] = {}
    for key in keys:
        if not isinstance(key, str):
            raise ValueError(f"the key of a storage is a {type(key).__name__}")
        start = end + 8
        num_elements = int.from_bytes(data[end:start].tobytes(), "little")
        dtype = dtypes[key] or torch.uint8  # an untyped storage counts bytes
        places[key] = _Place(data, start, num_elements * dtype.itemsize)
        end = start + places[key].num_bytes
        if end > len(data):
            raise CheckpointError(f"{path} is truncated: the storage {key!r} extends beyond its end.")
    reader = _Interpreter(_Storages(path, mapped, places.__getitem__))
    return reader, reader.value(tree)


class _Storages:
    """The storages of a file by key, and the limit on the total size of tensors, relative to the file's size.

    Args:
        path: the file.
        mapped: False copies the storages.
        find: function that returns the location of a storage by its key. It is called on the storage's first use, and
            raises a KeyError for an unknown key.
    """

    def __init__(self, path: pathlib.Path, mapped: bool, find: Callable[[str], _Place]) -> None:
        self._path = path
        self._mapped = mapped
        self._find = find
        self._file_bytes = path.stat().st_size
        self._tensor_bytes = 0  # of all tensors so far
        # 1-D tensors of complete storages, of which all tensors are views, by key and dtype. Tensors of several dtypes
        # may use an untyped storage.
        self._flat_tensors: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def count_bytes(self, num_bytes: int) -> None:
        """Add bytes to the total size of tensors. Raise a `CheckpointError` if the total exceeds the limit."""
        self._tensor_bytes += num_bytes
        limit = _MAX_TIMES_FILE_SIZE * self._file_bytes + _ADDITIONAL_BYTES
        if self._tensor_bytes > limit:
            raise CheckpointError(
                f"{self._path} has {self._file_bytes} bytes, and its tensors have more than {limit}, the limit for a "
                "file of this size: they repeat elements. If you trust its author, save contiguous copies of its "
                "tensors."
            )

    def tensor(
        self, storage: object, dtype: torch.dtype | None, offset: int, sizes: list[int], strides: list[int]
    ) -> torch.Tensor:
        """Check that a storage contains all elements of a tensor, and build the tensor.

        Args:
            storage: the placeholder of the storage.
            dtype: the tensor's dtype if the storage is untyped. It has no effect for other storages.
            offset: first element in the storage.
            sizes: shape of the tensor.
            strides: strides of the tensor, in elements.
        """
        flat = self._flat(storage, dtype)
        if len(sizes) != len(strides):
            raise ValueError(f"a tensor of sizes {sizes} and strides {strides}")
        num_elements = math.prod(sizes)
        self.count_bytes(num_elements * flat.itemsize)
        if num_elements == 0:
            return torch.empty(sizes, dtype=flat.dtype)
        last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        if last >= flat.numel():
            raise CheckpointError(
                f"a tensor of sizes {sizes} and strides {strides} at {offset} extends beyond its storage of "
                f"{flat.numel()} elements. The file is damaged or malicious."
            )
        return torch.as_strided(flat, sizes, strides, offset)

    def _flat(self, placeholder: object, dtype: torch.dtype | None) -> torch.Tensor:
        """Return the 1-D tensor of a storage's placeholder. `dtype` is used if the storage is untyped."""
        storage = _StorageReference.of(placeholder)
        storage_dtype = _STORAGE_DTYPES[storage.class_name]
        num_elements = checked_size(storage.size)
        if storage_dtype is not None:
            dtype = storage_dtype
        elif dtype is None:
            raise ValueError("a tensor without a dtype")
        else:
            num_elements //= dtype.itemsize  # the size of an untyped storage is in bytes
        if (storage.key, dtype) not in self._flat_tensors:
            self._flat_tensors[storage.key, dtype] = self._elements(storage.key, dtype, num_elements)
        flat = self._flat_tensors[storage.key, dtype]
        if storage.view is None:
            return flat
        _, start, length = storage.view
        return flat[checked_size(start) : checked_size(start) + checked_size(length)]

    def _elements(self, key: str, dtype: torch.dtype, num_elements: int) -> torch.Tensor:
        place = self._find(key)
        needed = num_elements * dtype.itemsize
        if place.num_bytes < needed:
            raise CheckpointError(f"{self._path}: the storage {key!r} has {place.num_bytes} bytes, expected {needed}.")
        end = place.start + needed
        if end > len(place.data):
            raise CheckpointError(f"{self._path} is truncated: the storage {key!r} extends beyond its end.")
        if num_elements == 0:
            return torch.empty(0, dtype=dtype)
        content = place.data[place.start : end]
        if not self._mapped or place.start % dtype.itemsize:  # elements must be aligned
            content = content.copy()
        return torch.frombuffer(content, dtype=dtype)


class _StorageReference(NamedTuple):
    """The reference to a storage in a pickle.

    Attributes:
        class_name: key of `_STORAGE_DTYPES`.
        key: name of the storage in the file.
        size: number of elements, or of bytes for an untyped storage. It is not checked.
        view: key, first element and length of a part of the storage, as torch before 0.4 saved views of storages. None
            for the complete storage.
    """

    class_name: str
    key: str
    size: Any
    view: Any

    @classmethod
    def of(cls, placeholder: object) -> _StorageReference:
        if type(placeholder) is not Placeholder or placeholder.name != STORAGE or placeholder.args is None:
            raise ValueError("a tensor without a storage")
        # The persistent id: ("storage", class, key, device, size). Files of torch before 1.6 have a sixth item,
        # the view or None.
        _, kind, key, _device, size, *view = placeholder.args[0]
        if type(kind) is not Placeholder or type(key) is not str:
            raise ValueError("a storage without a type and a key")
        return cls(kind.name, key, size, view[0] if view else None)


class _Result(NamedTuple):
    """The value of a placeholder or container.

    Attributes:
        value: the value.
        num_values: number of values in it, including itself. Each further reference adds this number.
        source: the placeholder or container. This reference keeps it alive, so that no other object has its id.
    """

    value: Any
    num_values: int
    source: Any


class _Interpreter:
    """An interpreter that replaces placeholders with supported names by values, and collects unsupported names.

    Attributes:
        storages: the storages of the file.
        unknown: names of unsupported objects so far.
    """

    def __init__(self, storages: _Storages) -> None:
        self.storages = storages
        self.unknown: set[str] = set()
        # By the id of a placeholder or container, which cannot be hashed. An object that the file refers to several
        # times has one result, so that tensors and containers remain shared.
        self._results: dict[int, _Result] = {}
        self._open: set[int] = set()  # ids of the containers around the current value
        self._count = 0  # number of values so far

    def value(self, value: Any) -> Any:
        """Return the value of a parsed object: a placeholder, a container or a plain value.

        Raises:
            CheckpointError: a container contains itself, or there are too many values.
        """
        kind = type(value)
        if kind not in _SHARED:
            self._add_count(1 + _length_of(value) // _CHARACTERS_PER_VALUE)
            return value
        known = self._results.get(id(value))
        if known is not None:
            self._add_count(known.num_values)
            return known.value
        if id(value) in self._open:
            raise CheckpointError("a container in the file contains itself. The file is damaged or malicious.")
        count_before = self._count
        self._add_count(1)
        self._open.add(id(value))
        if kind is Placeholder:
            result = self._replaced(value)
        elif kind is dict:
            result = {self.value(key): self.value(item) for key, item in value.items()}
        else:
            result = kind(self.value(item) for item in value)
        self._open.discard(id(value))
        self._results[id(value)] = _Result(result, self._count - count_before, value)
        return result

    def _replaced(self, placeholder: Placeholder) -> Any:
        is_call = placeholder.args is not None
        if not is_call and placeholder.name in _REFERENCES:
            return _REFERENCES[placeholder.name]
        if is_call and placeholder.name in _CALLS:
            return _CALLS[placeholder.name](self, placeholder)
        return self.unsupported(placeholder)

    def arguments(self, call: Placeholder) -> tuple[Any, ...]:
        """Return the values of a call's arguments."""
        values: tuple[Any, ...] = self.value(call.args)
        return values

    def unsupported(self, placeholder: Placeholder) -> Placeholder:
        """Collect the name of an unsupported object, and return its placeholder."""
        self.unknown.add(placeholder.name)
        return placeholder

    def _add_count(self, number: int) -> None:
        self._count += number
        if self._count > MAX_VALUES:
            raise CheckpointError(
                f"the file's pickle expands to more than {MAX_VALUES} values, the limit: it repeats containers, or has "
                "long lists. Save these as tensors."
            )


def _length_of(value: object) -> int:
    """Return the length of text or bytes, the size of an integer in full bytes, or 0 for another value."""
    if isinstance(value, (str, bytes, bytearray)):
        return len(value)
    return value.bit_length() // 8 if type(value) is int else 0


# The functions below return the value of a call. They have the signature `_Function`.


def _tensor(reader: _Interpreter, call: Placeholder) -> torch.Tensor:
    """Return the tensor of `_rebuild_tensor_v2`, or of `_rebuild_tensor_v3`, which has a dtype as its 7th argument."""
    # `reader.value` is not called for the storage, whose placeholder has no value.
    storage, offset, size, stride, _requires_grad, _hooks, *rest = call.args or ()
    dtype = STORABLE_DTYPES[rest.pop(0).name] if call.name.endswith("_v3") else None
    sizes = checked_sizes(reader.value(size))
    strides = checked_sizes(reader.value(stride))
    tensor = reader.storages.tensor(storage, dtype, checked_size(offset), sizes, strides)
    # The last argument may be a dict. torch saves lazily conjugated or negated views with these flags in it.
    flags = rest[0] if rest else None
    if isinstance(flags, dict) and flags.get("conj"):
        tensor = tensor.conj()
    if isinstance(flags, dict) and flags.get("neg"):
        tensor = tensor._neg_view()
    return tensor


def _tensor_with_attributes(reader: _Interpreter, call: Placeholder) -> Any:
    """Interpret a tensor with attributes, or a tensor of a sub-class. The attributes are skipped."""
    rebuild, kind, args, _attributes = call.args or ()
    if type(rebuild) is not Placeholder or type(args) is not tuple:
        raise ValueError("a tensor subclass that no function builds")
    is_subclass = type(kind) is Placeholder and kind.name not in ("torch.Tensor", "torch.nn.parameter.Parameter")
    if is_subclass:
        return reader.unsupported(kind)
    if rebuild.name not in _TENSOR_CALLS:
        return reader.unsupported(rebuild)
    return reader.value(Placeholder(rebuild.name, args))


def _parameter(reader: _Interpreter, call: Placeholder) -> Any:
    """Return the tensor of a Parameter. Its further arguments, such as attributes, are skipped."""
    data, *_ = call.args or ()
    return reader.value(data)


def _items(reader: _Interpreter, call: Placeholder) -> dict[Any, Any]:
    """Return the items that the pickle sets after the call."""
    return {checked_key(reader.value(key)): reader.value(value) for key, value in call.pairs}


def _dict(reader: _Interpreter, call: Placeholder) -> dict[Any, Any]:
    """Return the dict of a call without arguments, or with a dict or key-value pairs."""
    arguments = reader.arguments(call)
    first = arguments[0] if arguments else {}
    pairs = first.items() if isinstance(first, dict) else first
    items = {checked_key(key): value for key, value in pairs}
    return items | _items(reader, call)


def _default_dict(reader: _Interpreter, call: Placeholder) -> Any:
    arguments = reader.arguments(call)
    factory = arguments[0] if arguments else None
    if isinstance(factory, Placeholder):
        # An unsupported factory, whose name has been collected. The dict is skipped with it.
        return factory
    return defaultdict(factory, _items(reader, call))


def _set(reader: _Interpreter, call: Placeholder) -> set[Any]:
    arguments = reader.arguments(call)
    members = arguments[0] if arguments else ()
    return set(map(checked_key, members))


def _bytes(reader: _Interpreter, call: Placeholder) -> bytes:
    text, codec = reader.arguments(call)
    if type(text) is not str or codec not in ("latin1", "latin-1"):
        raise ValueError("bytes in another encoding than latin1")
    return bytes(text, "latin1")


def _numpy_dtype(reader: _Interpreter, call: Placeholder) -> np.dtype[Any] | Placeholder:
    name, *_ = reader.arguments(call)
    if not isinstance(name, str) or not _NUMPY_DTYPE.fullmatch(name):  # text, objects, dates and structured types
        return reader.unsupported(call)
    dtype = np.dtype(name)
    # The name, such as "f4", has no byte order. The state begins with a version and the byte order, such as (3, "<").
    order = call.state[1] if call.state else "|"
    if order not in ("<", ">"):
        return dtype
    return np.dtype(f"{order}{dtype.str[1:]}")


def _numpy_scalar(reader: _Interpreter, call: Placeholder) -> Any:
    dtype, data = reader.arguments(call)
    if isinstance(dtype, Placeholder):  # an unsupported dtype, whose name has been collected
        return dtype
    if len(data) != dtype.itemsize:
        raise ValueError(f"{len(data)} bytes for a {dtype}")
    return np.frombuffer(data, dtype)[0]


def _numpy_array(reader: _Interpreter, call: Placeholder) -> Any:
    # The call creates an empty array. `ndarray.__setstate__` receives the shape and the elements.
    _version, shape, dtype, is_fortran, data = reader.value(call.state)
    if isinstance(dtype, Placeholder):  # an unsupported dtype, whose name has been collected
        return dtype
    sizes = checked_sizes(shape)
    return np.frombuffer(data, dtype).reshape(sizes, order="F" if is_fortran else "C").copy()


_DTYPES = (
    "float64", "float32", "float16", "bfloat16", "complex32", "complex64", "complex128",
    "uint64", "uint32", "uint16", "uint8", "int64", "int32", "int16", "int8", "bool",
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
)  # fmt: skip
# The dtypes that tensors of a file may have.
STORABLE_DTYPES: dict[str, torch.dtype] = {f"torch.{name}": getattr(torch, name) for name in _DTYPES}
# The dtype of each class of storages. None for untyped storages.
_STORAGE_DTYPES: dict[str, torch.dtype | None] = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
    "torch.ComplexDoubleStorage": torch.complex128,
    "torch.ComplexFloatStorage": torch.complex64,
    "torch.storage.UntypedStorage": None,
}
_BUILTINS = (int, float, str, bool, list, dict, set, tuple, bytes)
# The values of imports that are not called.
_REFERENCES: dict[str, Any] = {
    **STORABLE_DTYPES,
    **{f"builtins.{kind.__name__}": kind for kind in _BUILTINS},
    **{f"__builtin__.{kind.__name__}": kind for kind in _BUILTINS},
    "__builtin__.long": int,
    "__builtin__.unicode": str,
}
# The classes of parsed objects that can occur several times in the tree or contain others.
_SHARED = frozenset({Placeholder, dict, list, tuple, set, frozenset})
_NUMPY_DTYPE = re.compile(r"[<>|=]?[biufc][0-9]{1,2}")

_Function = Callable[[_Interpreter, Placeholder], Any]
# Without the sub-class call itself, so that a file cannot nest it.
_TENSOR_CALLS = (
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3",
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_parameter_with_state",
)
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
# The functions that return the value of a call, by the name of what is called.
_CALLS: dict[str, _Function] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _tensor_with_attributes,
    "torch.Size": lambda reader, call: torch.Size(checked_sizes(*reader.arguments(call))),
    "torch.device": lambda reader, call: torch.device(*reader.arguments(call)),
    "collections.OrderedDict": _dict,
    "collections.defaultdict": _default_dict,
    "collections.Counter": lambda reader, call: Counter(_dict(reader, call)),
    "argparse.Namespace": lambda reader, call: reader.value(call.state or {}),
    "lightning.fabric.utilities.data.AttributeDict": _dict,
    "lightning_fabric.utilities.data.AttributeDict": _dict,
    "lightning.pytorch.utilities.parsing.AttributeDict": _dict,
    "pytorch_lightning.utilities.parsing.AttributeDict": _dict,
    "_codecs.encode": _bytes,
    "numpy.dtype": _numpy_dtype,
}
for _module in ("builtins", "__builtin__"):
    _CALLS[f"{_module}.set"] = _set
    _CALLS[f"{_module}.frozenset"] = lambda reader, call: frozenset(_set(reader, call))
    _CALLS[f"{_module}.complex"] = lambda reader, call: complex(*reader.arguments(call))
    _CALLS[f"{_module}.bytes"] = lambda reader, call: b""  # how protocol 2 writes empty bytes
for _module in ("numpy.core.multiarray", "numpy._core.multiarray"):
    _CALLS[f"{_module}.scalar"] = _numpy_scalar
    _CALLS[f"{_module}._reconstruct"] = _numpy_array
for _module in ("pathlib", "pathlib._local"):
    for _name in _PATHS:
        _CALLS[f"{_module}.{_name}"] = lambda reader, call: pathlib.Path(*reader.arguments(call))
