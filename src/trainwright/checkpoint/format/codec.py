"""Conversion of state trees (nested plain data with tensors) to JSON and tensors and back, exactly and without pickle.

`encode` converts a state tree to a JSON value and a dict of tensors. The JSON value refers to the tensors by name.
`decode` reverses this. Values of JSON's own types are written directly. Any other value becomes a node: a JSON object
with the value's type, its tag, under the key `"$"`, and usually its content under the key `"v"`. For example,

    {"sizes": (1, 2), "exp_avg": tensor}

becomes

    {"sizes": {"$": "tuple", "v": [1, 2]}, "exp_avg": {"$": "tensor", "v": "exp_avg"}}

and the dict `{"exp_avg": tensor}`. To support another type, add it to `_SCALARS` or to `_Encoder.value`, and add its
tag to `_DECODERS`.

Reading never imports or calls anything that the file names. Only the types in this module can be read.
"""

from __future__ import annotations

import datetime
import math
import pathlib
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from trainwright.checkpoint.disk.planned_file import PlannedFile
from trainwright.checkpoint.disk.untrusted import (
    check_json_size,
    dump_json,
    inside,
    is_printable,
    read_json,
    reading,
    shortened,
)
from trainwright.checkpoint.format.regions import TensorShards
from trainwright.checkpoint.format.safetensors_io import (
    dtype_name,
    from_storable,
    plan_safetensors,
    read_safetensors,
    to_storable,
)
from trainwright.core.duration import Duration
from trainwright.core.errors import CheckpointError
from trainwright.core.metric_value import MetricValue

T = TypeVar("T")

TAG = "$"
# More than real states need, and less than the recursion limits of Python and the JSON parser.
MAX_DEPTH = 150

# The default factories of a defaultdict that can be saved.
_FACTORIES: dict[str, Callable[[], Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "list": list,
    "dict": dict,
    "set": set,
    "tuple": tuple,
    "bool": bool,
}
_FACTORY_NAMES = {factory: name for name, factory in _FACTORIES.items()}
_TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)
_SCALAR_KINDS = "biufcmM"  # numpy's letters for bool, integers, floats, complex numbers, time spans and times
_ARRAY_KINDS = _SCALAR_KINDS + "SU"  # bytes and text, too
# A result of `dtype.str` for these kinds, such as "<f4" or "<M8[ns]". np.dtype alone also parses structured types.
_ARRAY_DTYPE = re.compile(r"[<>|=]?[a-zA-Z][0-9]{1,9}(\[[0-9]{0,9}[a-zA-Zμ]{1,7}\])?")

# Function that returns a sharded tensor for its name, full shape and dtype name; see `find_shards`.
FindShards = Callable[[str, tuple[int, ...], str], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Stores:
    """The sources of a tree's tensors.

    Attributes:
        tensors: full tensors by name.
        shards: function that returns sharded tensors. If None, a sharded tensor in the tree raises an error.
    """

    tensors: Mapping[str, torch.Tensor]
    shards: FindShards | None = None


def encode(
    tree: object, root: str = "", *, shards: dict[str, TensorShards] | None = None
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Split a state tree into a JSON value and its tensors.

    Args:
        tree: nested None, numbers, text, bytes, built-in containers, Counters, OrderedDicts, defaultdicts of a built-in
            factory, torch tensors, sizes, dtypes and devices, numpy arrays and scalars, dates, datetimes, timedeltas,
            paths and `Duration`s. Dict keys and set members must be hashable and not tensors. Subclasses are not
            supported.
        root: the prefix of paths in error messages and tensor names.
        shards: dict to which each `TensorShards` in the tree is added by name. Default: None, which raises for
            `TensorShards`.

    Returns:
        The JSON value, and the detached tensors by their path in the tree. Tensors are not copied. A tensor object that
        occurs several times in the tree has one entry.

    Raises:
        CheckpointError: the tree has a value of another type, contains itself, or is nested more than 150 levels deep.
            The message names the path, as in `callbacks.EarlyStopping.best`.
    """
    encoder = _Encoder(shards)
    json_value = encoder.value(tree, root, 0)
    return json_value, encoder.tensors


def decode(value: object, tensors: Mapping[str, torch.Tensor], shards: FindShards | None = None) -> Any:
    """Rebuild the tree from the results of `encode`.

    The tree contains the tensor objects of `tensors`, not copies. `shards` returns sharded tensors; see `find_shards`.

    Raises:
        CheckpointError: a tensor is missing, or `value` is not a result of `encode`.
    """
    try:
        return _decode(value, Stores(tensors, shards))
    except RecursionError as error:
        raise CheckpointError(
            "the saved state is nested too deeply for a state that Trainwright has written."
        ) from error


def _join(path: str, key: object) -> str:
    """Return the path of a dict's entry: `optimizer.lr` for a text as key, `optimizer[0]` for other keys."""
    if type(key) is str:
        return f"{path}.{key}" if path else key
    return f"{path}[{key!r}]"


def _is_json_object(value: dict[Any, Any]) -> bool:
    """Return whether a dict can be written as a JSON object that cannot be confused with a node."""
    if TAG in value:
        return False
    return all(type(key) is str and is_printable(key) for key in value)


class _Encoder:
    """One call of `encode`. See `encode` for `shards`.

    Attributes:
        tensors: the tensors that have been encoded so far, by name.
    """

    def __init__(self, shards: dict[str, TensorShards] | None) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._shards = shards
        # Ids, since containers are not hashable, and tensors with equal values are different tensors. The tree keeps
        # all values alive during the call, so that no id is reused.
        self._open: set[int] = set()  # ids of the containers around the current value
        self._nodes: dict[int, Any] = {}  # id of a tensor or `TensorShards` → its node

    def value(self, value: Any, path: str, depth: int) -> Any:
        """Return the JSON value for a value at `path`, which is inside `depth` containers."""
        kind = type(value)  # not isinstance: a subclass would be read back as its base class
        if value is None or kind is bool:
            return value
        encode_scalar = _SCALARS.get(kind)
        if encode_scalar is not None:
            return encode_scalar(value)
        if kind in _TENSOR_TYPES:
            return self._tensor(value, path)
        if kind is TensorShards:
            return self._sharded(value, path)
        if kind is np.ndarray:
            return self._array(value, path)
        if isinstance(value, np.generic) and value.dtype.kind in _SCALAR_KINDS:
            return {TAG: "npscalar", "dtype": value.dtype.str, "v": value.tobytes().hex()}
        if kind is datetime.datetime:
            return self._datetime(value, path)
        if kind not in _CONTAINERS:
            raise self._refused(value, path)
        if id(value) in self._open:
            raise CheckpointError(f"{path or 'the state'} contains itself and cannot be saved. Remove this reference.")
        if depth >= MAX_DEPTH:
            raise CheckpointError(f"{path} is nested more than {MAX_DEPTH} deep and cannot be saved. Flatten it.")
        self._open.add(id(value))
        try:
            return self._container(value, kind, path, depth + 1)
        finally:
            self._open.discard(id(value))

    def _container(self, value: Any, kind: type, path: str, depth: int) -> Any:
        """Return the JSON value for a container of type `kind`, whose items are inside `depth` containers."""
        if kind in (list, tuple):
            items = [self.value(item, f"{path}[{index}]", depth) for index, item in enumerate(value)]
            return items if kind is list else {TAG: "tuple", "v": items}
        if kind in (set, frozenset):
            members = [self._hashable(item, path, depth) for item in value]
            # Sorted, since the iteration order of a set of strings differs between processes.
            return {TAG: kind.__name__, "v": sorted(members, key=dump_json)}
        if kind is dict and _is_json_object(value):
            return {key: self.value(item, _join(path, key), depth) for key, item in value.items()}
        # Dicts with other keys than text, and subclasses of dict.
        pairs = []
        for key, item in value.items():
            encoded_key = self._hashable(key, path, depth)
            pairs.append([encoded_key, self.value(item, _join(path, key), depth)])
        node: dict[str, Any] = {TAG: kind.__name__, "v": pairs}
        if kind is defaultdict:
            node["factory"] = self._factory(value.default_factory, path)
        return node

    def _factory(self, factory: Callable[[], Any] | None, path: str) -> str | None:
        if factory is None:
            return None
        if factory not in _FACTORY_NAMES:
            raise CheckpointError(
                f"{path or 'the state'}: a defaultdict of {factory!r} cannot be saved; only "
                f"{', '.join(_FACTORIES)} are supported. Save dict(...) of it, and rebuild it on load."
            )
        return _FACTORY_NAMES[factory]

    def _hashable(self, key: object, path: str, depth: int) -> Any:
        if isinstance(key, torch.Tensor):
            raise CheckpointError(
                f"{path or 'the state'} has a tensor as a key or set member, which cannot be saved. Use a number, "
                "such as tensor.item(), or a string."
            )
        return self.value(key, _join(path, key), depth)

    def _tensor(self, tensor: torch.Tensor, path: str) -> Any:
        """Return the node of a tensor. A tensor that was encoded before, such as a tied weight, has the same node."""
        if id(tensor) not in self._nodes:
            try:
                stored, original_dtype = to_storable(tensor)
            except CheckpointError as error:
                raise CheckpointError(f"{path or 'the state'}: {error}") from error
            node = {TAG: "tensor", "v": add_named(self.tensors, stored, path)}
            if original_dtype is not None:
                node["dtype"] = original_dtype
            self._nodes[id(tensor)] = node
        return self._nodes[id(tensor)]

    def _sharded(self, value: TensorShards, path: str) -> Any:
        """Return the node of a sharded tensor; see `_tensor`."""
        if self._shards is None:
            raise CheckpointError(f"{path or 'the state'} is sharded. Save it with all ranks (see plan_share).")
        if id(value) not in self._nodes:
            self._nodes[id(value)] = {
                TAG: "pieces",
                "v": add_named(self._shards, value, path),
                "shape": list(value.shape),
                "dtype": dtype_name(value.dtype),
            }
        return self._nodes[id(value)]

    def _array(self, array: np.ndarray[Any, Any], path: str) -> Any:
        if array.dtype.kind not in _ARRAY_KINDS:
            raise CheckpointError(f"{path or 'the state'}: a numpy array of dtype {array.dtype} cannot be saved.")
        node = {TAG: "ndarray", "dtype": array.dtype.str, "shape": list(array.shape)}
        if array.nbytes:
            # As bytes, since torch lacks some dtypes of numpy. The bytearray is writable, as torch needs it.
            data = np.frombuffer(bytearray(array.tobytes()), dtype=np.uint8)
            node["v"] = add_named(self.tensors, torch.from_numpy(data), path)
        return node

    def _datetime(self, value: datetime.datetime, path: str) -> Any:
        import zoneinfo

        # `isoformat` contains the UTC offset of a `datetime.timezone`, but not `fold` and not the name of a zone.
        node: dict[str, Any] = {TAG: "datetime", "v": value.isoformat(), "fold": value.fold}
        zone = value.tzinfo
        if isinstance(zone, zoneinfo.ZoneInfo) and zone.key is not None:
            return {**node, "v": value.replace(tzinfo=None).isoformat(), "zone": zone.key}
        if zone is None or type(zone) is datetime.timezone:
            return node
        raise self._refused(value, path)

    def _refused(self, value: object, path: str) -> CheckpointError:
        kind = type(value)
        return CheckpointError(
            f"{path or 'the state'} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold, "
            "because it contains JSON and tensors, but no pickle. Save plain data instead (numbers, text, lists, "
            "dicts, tensors, arrays, dates, paths), for example from state_dict(), and rebuild the object on load."
        )


def add_named(named: dict[str, T], value: T, path: str) -> str:
    """Add a value to `named` under its path, with a number appended if this name is taken. Return the used name.

    The names are `exp_avg`, `exp_avg#2`, `exp_avg#3` and so on. Different values may have the same path: in
    `{"a.b": one, "a": {"b": other}}`, both have the path `a.b`.
    """
    # Lone surrogates, which UTF-8 cannot encode, are replaced by their escape sequences.
    name = path.encode("utf-8", "backslashreplace").decode() or "value"
    unique = name
    count = 1
    while unique in named or unique == "__metadata__":  # the name of the metadata in safetensors files
        count += 1
        unique = f"{name}#{count}"
    named[unique] = value
    return unique


def _encode_int(value: int) -> Any:
    # Other JSON readers round integers of more than 64 bits, and Python parses at most 4300 decimal digits.
    return value if -(2**63) <= value < 2**64 else {TAG: "int", "v": hex(value)}


def _encode_float(value: float) -> Any:
    return value if math.isfinite(value) else {TAG: "float", "v": repr(value)}


def _encode_str(value: str) -> Any:
    return value if is_printable(value) else {TAG: "str", "v": value.encode("utf-8", "surrogatepass").hex()}


def _tagged(tag: str, content: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that encodes a value as the node `{"$": tag, "v": content(value)}`."""
    return lambda value: {TAG: tag, "v": content(value)}


# Type → the function that returns the JSON value for a value of this type.
_SCALARS: dict[type, Callable[[Any], Any]] = {
    int: _encode_int,
    float: _encode_float,
    MetricValue: lambda value: _encode_float(float(value)),
    str: _encode_str,
    complex: _tagged("complex", lambda v: [_encode_float(v.real), _encode_float(v.imag)]),
    bytes: _tagged("bytes", bytes.hex),
    np.str_: _tagged("npstr", lambda v: _encode_str(str(v))),
    np.bytes_: _tagged("npbytes", lambda v: bytes(v).hex()),
    datetime.date: _tagged("date", datetime.date.isoformat),
    datetime.timedelta: _tagged("timedelta", lambda v: [v.days, v.seconds, v.microseconds]),
    type(pathlib.Path()): _tagged("path", lambda v: _encode_str(str(v))),  # PosixPath or WindowsPath
    Duration: _tagged("duration", lambda v: [_encode_float(v.value), v.unit]),
    torch.Size: _tagged("size", list),
    torch.dtype: _tagged("dtype", lambda v: str(v).removeprefix("torch.")),
    torch.device: _tagged("device", str),
}
_CONTAINERS = frozenset({list, tuple, dict, set, frozenset, Counter, OrderedDict, defaultdict})


def _decode(value: object, stores: Stores) -> Any:
    if isinstance(value, list):
        return [_decode(item, stores) for item in value]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {key: _decode(item, stores) for key, item in value.items()}
    tag = value[TAG]
    if not isinstance(tag, str) or tag not in _DECODERS:
        raise CheckpointError(
            f"the saved state holds a {tag!r}, which this Trainwright cannot read. Upgrade Trainwright, or use "
            "another checkpoint."
        )
    try:
        return _DECODERS[tag](value, stores)
    except (CheckpointError, RecursionError):
        raise
    except Exception as error:  # constructors raise various exceptions for invalid values
        raise CheckpointError(f"the saved state holds a {tag!r} that cannot be read: {shortened(error)}.") from error


def _stored(node: Any, stores: Stores) -> torch.Tensor:
    """Return the tensor that is stored for a node of a tensor or array."""
    name = node["v"]
    if name not in stores.tensors:
        raise CheckpointError(f"the tensor {name!r} of the saved state is missing. Use another checkpoint.")
    return stores.tensors[name]


def _decode_shards(node: Any, stores: Stores) -> torch.Tensor:
    if stores.shards is None:
        raise CheckpointError(f"the tensor {node['v']!r} is sharded, and its shards are missing.")
    return stores.shards(str(node["v"]), tuple(node["shape"]), str(node["dtype"]))


def _array_dtype(name: object, kinds: str) -> np.dtype[Any]:
    """Return the numpy dtype `name`. Raise a ValueError unless its kind is one of the letters `kinds`."""
    if not isinstance(name, str) or not _ARRAY_DTYPE.fullmatch(name):
        raise ValueError(f"{name!r} is not a dtype of an array")
    dtype = np.dtype(name)
    if dtype.kind not in kinds:
        raise ValueError(f"an array of {dtype}")
    return dtype


def _decode_array(node: Any, stores: Stores) -> Any:
    dtype = _array_dtype(node["dtype"], _ARRAY_KINDS)
    shape = tuple(node["shape"])
    if "v" not in node:  # an array of 0 bytes has no stored tensor
        if math.prod(shape) * dtype.itemsize:
            raise ValueError(f"an array of shape {shape} and dtype {dtype} has lost its data")
        return np.ndarray(shape, dtype)
    return _stored(node, stores).cpu().numpy().view(dtype).reshape(shape).copy()


def _decode_scalar(node: Any, stores: Stores) -> Any:
    dtype = _array_dtype(node["dtype"], _SCALAR_KINDS)
    return np.frombuffer(bytes.fromhex(node["v"]), dtype)[0]


def _decode_datetime(node: Any, stores: Stores) -> Any:
    import zoneinfo

    value = datetime.datetime.fromisoformat(node["v"]).replace(fold=node["fold"])
    if "zone" not in node:
        return value
    return value.replace(tzinfo=zoneinfo.ZoneInfo(node["zone"]))


def _decode_dtype(node: Any, stores: Stores) -> Any:
    dtype = vars(torch).get(node["v"])  # `getattr` would import a lazy module of torch that a file names
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {node['v']!r}")
    return dtype


def _items(node: Any, stores: Stores) -> list[Any]:
    return [_decode(item, stores) for item in node["v"]]


def _pairs(node: Any, stores: Stores) -> dict[Any, Any]:
    return {_decode(key, stores): _decode(item, stores) for key, item in node["v"]}


def _decode_defaultdict(node: Any, stores: Stores) -> Any:
    name = node["factory"]
    factory = None if name is None else _FACTORIES[name]
    return defaultdict(factory, _pairs(node, stores))


# Tag → the function that returns the value of a node.
_DECODERS: dict[str, Callable[[Any, Stores], Any]] = {
    "tensor": lambda node, stores: from_storable(_stored(node, stores), node.get("dtype")),
    "pieces": _decode_shards,
    "ndarray": _decode_array,
    "npscalar": _decode_scalar,
    "npstr": lambda node, stores: np.str_(_decode(node["v"], stores)),
    "npbytes": lambda node, stores: np.bytes_(bytes.fromhex(node["v"])),
    "tuple": lambda node, stores: tuple(_items(node, stores)),
    "set": lambda node, stores: set(_items(node, stores)),
    "frozenset": lambda node, stores: frozenset(_items(node, stores)),
    "dict": _pairs,
    "OrderedDict": lambda node, stores: OrderedDict(_pairs(node, stores)),
    "Counter": lambda node, stores: Counter(_pairs(node, stores)),
    "defaultdict": _decode_defaultdict,
    "int": lambda node, stores: int(node["v"], 16),
    "float": lambda node, stores: float(node["v"]),
    "complex": lambda node, stores: complex(*_items(node, stores)),
    "str": lambda node, stores: bytes.fromhex(node["v"]).decode("utf-8", "surrogatepass"),
    "bytes": lambda node, stores: bytes.fromhex(node["v"]),
    "datetime": _decode_datetime,
    "date": lambda node, stores: datetime.date.fromisoformat(node["v"]),
    "timedelta": lambda node, stores: datetime.timedelta(*node["v"]),
    "path": lambda node, stores: pathlib.Path(_decode(node["v"], stores)),
    "duration": lambda node, stores: Duration(*_items(node, stores)),
    "size": lambda node, stores: torch.Size(node["v"]),
    "dtype": _decode_dtype,
    "device": lambda node, stores: torch.device(node["v"]),
}


def plan_tree(
    stem: str, tree: object, *, root: str = "", shards: dict[str, TensorShards] | None = None
) -> list[PlannedFile]:
    """Plan the file `{stem}.json` for a state tree and, if it has tensors, `{stem}.safetensors`.

    All values except tensors are encoded immediately. Tensors are not copied. See `encode` for the other arguments and
    the errors. Sharded tensors are added to `shards`, and are not in the planned files.
    """
    json_value, tensors = encode(tree, root, shards=shards)
    return plan_pair(stem, json_value, tensors)


def plan_pair(stem: str, value: object, tensors: Mapping[str, torch.Tensor]) -> list[PlannedFile]:
    """Plan the file `{stem}.json` for a JSON value and, if there are tensors, `{stem}.safetensors`."""
    text = check_json_size(dump_json(value).encode() + b"\n", f"{stem}.json")
    files = [PlannedFile(f"{stem}.json", text)]
    if tensors:
        files.append(plan_safetensors(f"{stem}.safetensors", tensors))
    return files


def read_tree(folder: Path, stem: str, *, copy: bool = True, shards: FindShards | None = None) -> Any:
    """Read the files of `plan_tree` in `folder`. Tensors are on the CPU, with `copy=False` mapped from the file.

    `shards` returns the sharded tensors; see `find_shards`. If it is None, a sharded tensor raises an error.
    """
    path = inside(folder, f"{stem}.json", str(folder))
    if not path.is_file():
        raise CheckpointError(f"{path} is missing. Copy it again, or use another checkpoint.")
    tensor_path = inside(folder, f"{stem}.safetensors", str(folder))
    tensors = read_safetensors(tensor_path, copy=copy) if tensor_path.is_file() else {}
    with reading(path):
        content = read_json(path)
    try:
        with reading(path):
            return decode(content, tensors, shards)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
