"""Reading of `torch.save` files without running any code from them.

A `.pt`, `.bin` or `.ckpt` file is a zip archive with a pickle. Files of torch before 1.6 are several consecutive
pickles, followed by the storages. Unpickling calls every function that the pickle names.

This module only parses the pickle (see `pickle_parser`): each import and each call becomes a placeholder. It then
replaces placeholders with known names (tensors, plain containers, numbers) by values. Other placeholders and their
arguments remain as they are, so that they can be skipped even if they contain something that cannot be read. The memory
that a small file can use is limited. `torch.load(weights_only=True)` limits neither memory nor time, and a crafted file
could corrupt memory before torch 2.10 (CVE-2026-24747); torch 2.9 is supported.

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
        The tree, and the sorted names of unsupported objects. In the tree, such objects are placeholders, subclasses
            of dict are dicts, and parameters are tensors. Tensors are on the CPU. Tensors that shared a storage share
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
            storages.take(info.file_size)
            return np.frombuffer(bytearray(archive.read(info)), np.uint8), 0, info.file_size
        start = info.header_offset + _LOCAL_HEADER.size
        header = data[info.header_offset : start].tobytes()
        return data, start + sum(_LOCAL_HEADER.unpack(header)), info.file_size

    storages = _Storages(path, mapped, find)
    tree, _, _ = parse_pickle(archive.read(info), limit=MAX_PICKLE_BYTES, origin=str(path))
    reader = _Interpreter(storages)
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
    data = _map(path)
    end = 0
    values: list[Any] = []
    found: list[Placeholder] = []
    for number in range(5):
        value, end, storages = parse_pickle(data, end, limit=MAX_PICKLE_BYTES - end, origin=str(path))
        values.append(value)
        found += storages
        is_little = isinstance(value, dict) and value.get("little_endian") is True
        if number == 2 and (values[1] != _FORMER_VERSION or not is_little):
            raise CheckpointError(
                f"{path} does not have version {_FORMER_VERSION} of its format, or was not written on a little-endian "
                "machine."
            )
    dtypes: dict[str, torch.dtype | None] = {}
    for storage in found:
        kind, key, _, _ = _parts_of(storage)
        dtypes[key] = _STORAGE_DTYPES[kind]
    places: dict[str, _Place] = {}
    for key in values[4]:
        if not isinstance(key, str):
            raise ValueError(f"the key of a storage is a {type(key).__name__}")
        start = end + 8
        num_bytes = int.from_bytes(data[end:start].tobytes(), "little") * (dtypes[key] or torch.uint8).itemsize
        places[key] = data, start, num_bytes
        end = start + num_bytes
        if end > len(data):
            raise CheckpointError(f"{path} is truncated: the storage {key!r} extends beyond its end.")
    reader = _Interpreter(_Storages(path, mapped, places.__getitem__))
    return reader, reader.value(values[3])


class _Storages:
    """The storages of a file by key, and the limit on the total size of tensors, relative to the file's size.

    Args:
        path: the file.
        mapped: False copies the storages.
        find: function that returns the location of a storage in the file.
    """

    def __init__(self, path: pathlib.Path, mapped: bool, find: Callable[[str], _Place]) -> None:
        self._path = path
        self._mapped = mapped
        self._find = find
        self._size = path.stat().st_size
        self._taken = 0
        self._read: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def take(self, num_bytes: int) -> None:
        """Add bytes to the total size of tensors. Raise a `CheckpointError` if the total exceeds the limit."""
        self._taken += num_bytes
        limit = _FILE_SIZES * self._size + _FREE_BYTES
        if self._taken > limit:
            raise CheckpointError(
                f"{self._path} has {self._size} bytes, and its tensors have more than {limit}, the limit for a file of "
                "this size: they repeat elements. If you trust its author, save contiguous copies of its tensors."
            )

    def tensor(
        self, storage: object, dtype: torch.dtype | None, offset: int, sizes: list[int], strides: list[int]
    ) -> torch.Tensor:
        """Check that a storage contains all elements of a tensor, and build the tensor.

        `dtype` is used if the storage is untyped.
        """
        flat = self._flat(storage, dtype)
        if len(sizes) != len(strides):
            raise ValueError(f"a tensor of sizes {sizes} and strides {strides}")
        num = math.prod(sizes)
        self.take(num * flat.itemsize)
        if num == 0:
            return torch.empty(sizes, dtype=flat.dtype)
        last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        if last >= flat.numel():
            raise CheckpointError(
                f"a tensor of sizes {sizes} and strides {strides} at {offset} extends beyond its storage of "
                f"{flat.numel()} elements. The file is damaged or malicious."
            )
        return torch.as_strided(flat, sizes, strides, offset)

    def _flat(self, storage: object, dtype: torch.dtype | None) -> torch.Tensor:
        """Return the 1-D tensor of a storage's placeholder."""
        kind, key, num, view = _parts_of(storage)
        own = _STORAGE_DTYPES[kind]
        wanted = own or dtype
        if wanted is None:
            raise ValueError("a tensor without a dtype")
        # An untyped storage counts bytes.
        count = checked_size(num) if own is not None else checked_size(num) // wanted.itemsize
        if (key, wanted) not in self._read:
            self._read[key, wanted] = self._elements(key, wanted, count)
        flat = self._read[key, wanted]
        if view is None:
            return flat
        _, start, length = view  # torch before 0.4 pickled views of storages
        return flat[checked_size(start) : checked_size(start) + checked_size(length)]

    def _elements(self, key: str, dtype: torch.dtype, num: int) -> torch.Tensor:
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


def _parts_of(storage: object) -> tuple[str, str, Any, Any]:
    """Return the class name, key, number of elements and view of a storage's placeholder."""
    if type(storage) is not Placeholder or storage.name != STORAGE or storage.args is None:
        raise ValueError("a tensor without a storage")
    _, kind, key, _, num, *view = storage.args[0]
    if type(kind) is not Placeholder or type(key) is not str:
        raise ValueError("a storage without a type and a key")
    return kind.name, key, num, view[0] if view else None


class _Made(NamedTuple):
    value: Any
    num_values: int  # in it
    source: Any  # keeps the object alive, so that no other object has its id


class _Interpreter:
    """An interpreter that replaces placeholders with supported names by values, and collects unsupported names."""

    def __init__(self, storages: _Storages) -> None:
        self.storages = storages
        self.unknown: set[str] = set()
        # By the id of a placeholder or container, which cannot be hashed. It preserves shared objects.
        self._made: dict[int, _Made] = {}
        self._open: set[int] = set()  # ids of the containers around the current value
        self._count = 0  # number of values so far

    def value(self, value: Any) -> Any:
        """Return the value of a parsed object: a placeholder, a container or a plain value.

        Raises:
            CheckpointError: a container contains itself, or there are too many values.
        """
        kind = type(value)
        if kind not in _SHARED:
            self._add_count(1 + _length_of(value) // _TEXT_OF_A_VALUE)
            return value
        known = self._made.get(id(value))
        if known is not None:
            self._add_count(known.num_values)
            return known.value
        if id(value) in self._open:
            raise CheckpointError("a container in the file contains itself. The file is damaged or malicious.")
        before = self._count
        self._add_count(1)
        self._open.add(id(value))
        if kind is Placeholder:
            made = self._replaced(value)
        elif kind is dict:
            made = {self.value(key): self.value(item) for key, item in value.items()}
        else:
            made = kind(self.value(item) for item in value)
        self._open.discard(id(value))
        self._made[id(value)] = _Made(made, self._count - before, value)
        return made

    def _replaced(self, placeholder: Placeholder) -> Any:
        if placeholder.args is None and placeholder.name in _REFERENCES:
            return _REFERENCES[placeholder.name]
        if placeholder.args is not None and placeholder.name in _MAKERS:
            return _MAKERS[placeholder.name](self, placeholder)
        return self.unsupported(placeholder)

    def arguments(self, call: Placeholder) -> tuple[Any, ...]:
        """Return the values of a call's arguments."""
        found: tuple[Any, ...] = self.value(call.args)
        return found

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
    """Return the length of text or bytes, the size of an integer in bytes, or 0 for another value."""
    if isinstance(value, (str, bytes, bytearray)):
        return len(value)
    return value.bit_length() // 8 if type(value) is int else 0


def _tensor(reader: _Interpreter, call: Placeholder) -> torch.Tensor:
    storage, offset, size, stride, _requires_grad, _hooks, *rest = call.args or ()
    dtype = STORABLE_DTYPES[rest.pop(0).name] if call.name.endswith("_v3") else None
    sizes = checked_sizes(reader.value(size))
    strides = checked_sizes(reader.value(stride))
    tensor = reader.storages.tensor(storage, dtype, checked_size(offset), sizes, strides)
    # torch saves lazily conjugated or negated views with these flags.
    flags = rest[0] if rest else None
    if isinstance(flags, dict) and flags.get("conj"):
        tensor = tensor.conj()
    if isinstance(flags, dict) and flags.get("neg"):
        tensor = tensor._neg_view()
    return tensor


def _tensor_with_attributes(reader: _Interpreter, call: Placeholder) -> Any:
    """Interpret a tensor that was saved as a Parameter or with attributes. The attributes are skipped."""
    rebuild, kind, args, _attributes = call.args or ()
    if type(rebuild) is not Placeholder or type(args) is not tuple:
        raise ValueError("a tensor subclass that no function builds")
    is_subclass = type(kind) is Placeholder and kind.name not in ("torch.Tensor", "torch.nn.parameter.Parameter")
    if is_subclass:
        return reader.unsupported(kind)
    if rebuild.name not in ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter"):
        return reader.unsupported(rebuild)
    return reader.value(Placeholder(rebuild.name, args))


def _items(reader: _Interpreter, call: Placeholder) -> dict[Any, Any]:
    return {checked_key(reader.value(key)): reader.value(value) for key, value in call.pairs}


def _dict(reader: _Interpreter, call: Placeholder) -> dict[Any, Any]:
    first, *_ = reader.arguments(call) or ({},)
    pairs = first.items() if isinstance(first, dict) else first
    made = {checked_key(key): value for key, value in pairs}
    return made | _items(reader, call)


def _default_dict(reader: _Interpreter, call: Placeholder) -> Any:
    factory, *_ = reader.arguments(call) or (None,)
    return factory if isinstance(factory, Placeholder) else defaultdict(factory, _items(reader, call))


def _set(reader: _Interpreter, call: Placeholder) -> set[Any]:
    members, *_ = reader.arguments(call) or ((),)
    return set(map(checked_key, members))


def _bytes(reader: _Interpreter, call: Placeholder) -> bytes:
    text, codec = reader.arguments(call)
    if type(text) is not str or codec not in ("latin1", "latin-1"):
        raise ValueError("bytes in another encoding than latin1")
    return bytes(text, "latin1")


def _numpy_dtype(reader: _Interpreter, call: Placeholder) -> np.dtype[Any]:
    name, *_ = reader.arguments(call)
    if not isinstance(name, str) or not _NUMPY_DTYPE.fullmatch(name):  # np.dtype also parses structured types
        raise ValueError("a numpy array of an unsupported dtype")
    dtype = np.dtype(name)
    order = call.state[1] if call.state else "|"
    return np.dtype(f"{order}{dtype.str[1:]}") if order in ("<", ">") else dtype


def _numpy_scalar(reader: _Interpreter, call: Placeholder) -> Any:
    dtype, data = reader.arguments(call)
    if len(data) != dtype.itemsize:
        raise ValueError(f"{len(data)} bytes for a {dtype}")
    return np.frombuffer(data, dtype)[0]


def _numpy_array(reader: _Interpreter, call: Placeholder) -> Any:
    _version, shape, dtype, is_fortran, data = reader.value(call.state)
    sizes = checked_sizes(shape)
    return np.frombuffer(data, dtype).reshape(sizes, order="F" if is_fortran else "C").copy()


_DTYPES = (
    "float64", "float32", "float16", "bfloat16", "complex32", "complex64", "complex128",
    "uint64", "uint32", "uint16", "uint8", "int64", "int32", "int16", "int8", "bool",
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
)  # fmt: skip
# The dtypes that tensors of a file may have.
STORABLE_DTYPES: dict[str, torch.dtype] = {f"torch.{name}": getattr(torch, name) for name in _DTYPES}
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
_SHARED = frozenset({Placeholder, dict, list, tuple, set, frozenset})
_NUMPY_DTYPE = re.compile(r"[<>|=]?[biufc][0-9]{1,2}")

_Maker = Callable[[_Interpreter, Placeholder], Any]
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
# The functions that return the value of a call, by the name of what is called.
_MAKERS: dict[str, _Maker] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor,
    "torch._utils._rebuild_parameter": lambda reader, call: reader.arguments(call)[0],
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
    _MAKERS[f"{_module}.set"] = _set
    _MAKERS[f"{_module}.frozenset"] = lambda reader, call: frozenset(_set(reader, call))
    _MAKERS[f"{_module}.complex"] = lambda reader, call: complex(*reader.arguments(call))
    _MAKERS[f"{_module}.bytes"] = lambda reader, call: b""  # how protocol 2 writes empty bytes
for _module in ("numpy.core.multiarray", "numpy._core.multiarray"):
    _MAKERS[f"{_module}.scalar"] = _numpy_scalar
    _MAKERS[f"{_module}._reconstruct"] = _numpy_array
for _module in ("pathlib", "pathlib._local"):
    for _name in _PATHS:
        _MAKERS[f"{_module}.{_name}"] = lambda reader, call: pathlib.Path(*reader.arguments(call))
