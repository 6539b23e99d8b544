"""A reader of checkpoints that knows docs/checkpoint-format.md and nothing else: no torch, no NumPy, no Trainwright.

Tensors come as `Stored`, what Python has no type for as `Tagged`.
"""

from __future__ import annotations

import datetime
import itertools
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

WIDTHS = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
COMPLEX = {"torch.complex32": "F16", "torch.complex64": "F32", "torch.complex128": "F64"}
BYTES = {"torch.float8_e4m3fnuz", "torch.float8_e5m2fnuz", "torch.float8_e8m0fnu", "torch.float4_e2m1fn_x2"}


class Stored(NamedTuple):
    """A tensor: its dtype (safetensors' name, or the true one of a view), shape and little-endian bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Tagged(NamedTuple):
    """A value of a type that Python alone does not have."""

    tag: str
    value: Any


def read(folder: Path) -> dict[str, Any]:
    """Return the manifest and every part: "manifest", "trainer", "rng", "optimizer", "model"."""
    manifest = read_manifest((folder / "manifest.json").read_bytes())
    listed = {path: entry for part in manifest["parts"].values() for path, entry in part["files"].items()}
    for path, entry in listed.items():
        data = (folder / path).read_bytes()
        assert (len(data), digest(data)) == (entry["size"], entry["xxh3_128"]), path
    found: dict[str, Any] = {"manifest": manifest}
    found["trainer"] = read_tree(folder, "trainer", listed)
    for part, stem in (("rng", "rank"), ("optimizer", "optimizer")):
        numbers = [f"{part}/{stem}-{i:05d}" for i in range(len(listed)) if f"{part}/{stem}-{i:05d}.json" in listed]
        found[part] = [read_tree(folder, name, listed, read_pieces(folder, part, listed)) for name in numbers]
    if "model/state.json" in listed:
        found["model"] = read_tree(folder, "model/state", listed, read_pieces(folder, "model", listed))
    else:
        found["model"] = read_model(folder, listed)
    return found


def digest(data: bytes) -> str:
    """Return XXH3-128 with seed 0, the high half first."""
    value: int = xxhash.xxh3_128_intdigest(data, seed=0)
    return f"{value >> 64:016x}{value & (2**64 - 1):016x}"


def read_manifest(data: bytes) -> dict[str, Any]:
    """Return the object, its seal checked."""
    begin, digits, end = data[:-36], data[-36:-4], data[-4:]
    assert begin.endswith(b'"seal": "')
    assert digest(begin + b"0" * 32 + end) == digits.decode()
    manifest: dict[str, Any] = json.loads(data)
    assert manifest["format_version"] in (1, 2)
    manifest["metrics"] = {name: float(text) for name, text in manifest["metrics"].items()}
    return manifest


def read_safetensors(data: bytes) -> dict[str, Stored]:
    """Return name → tensor of a file's bytes."""
    (length,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    assert header.pop("__metadata__") == {"format": "pt"}
    found = {}
    place = 0
    for name, entry in sorted(header.items(), key=lambda item: (-WIDTHS[item[1]["dtype"]], item[0])):
        begin, end = entry["data_offsets"]
        size = math.prod(entry["shape"]) * WIDTHS[entry["dtype"]]
        assert (begin, end) == (place, place + size), name
        place = end
        found[name] = Stored(entry["dtype"], tuple(entry["shape"]), body[begin:end])
    assert place == len(body)
    return found


def as_true(tensor: Stored, dtype: str | None) -> Stored:
    """Return a tensor that was kept as a view with its true dtype and shape."""
    if dtype is None:
        return tensor
    if dtype in COMPLEX:
        assert (tensor.dtype, tensor.shape[-1]) == (COMPLEX[dtype], 2)
        return Stored(dtype, tensor.shape[:-1], tensor.data)
    assert (dtype in BYTES, tensor.dtype) == (True, "U8")
    return Stored(dtype, tensor.shape, tensor.data)


def read_model(folder: Path, listed: dict[str, Any]) -> dict[str, Any]:
    """Return name → tensor or extra value, in the order of the state dict."""
    index = json.loads((folder / "model" / "model.safetensors.index.json").read_bytes())
    notes = index["metadata"]["trainwright"]
    shards = {
        file: read_safetensors((folder / "model" / file).read_bytes()) for file in set(index["weight_map"].values())
    }
    found: dict[str, Any] = {
        name: as_true(shards[file][name], notes["dtypes"].get(name)) for name, file in index["weight_map"].items()
    }
    assert sum(len(tensor.data) for tensor in found.values()) == index["metadata"]["total_size"]
    found |= {name: found[first] for name, first in notes["tied"].items()}
    if "extra" in notes:
        found |= read_tree(folder, f"model/{notes['extra']}", listed)
    return found


def read_pieces(folder: Path, part: str, listed: dict[str, Any]) -> dict[Any, Stored]:
    """Return ("pieces", name) → tensor for those of a part that lie in pieces."""
    places: dict[str, tuple[str, tuple[int, ...], dict[int, bytes]]] = {}
    for i in itertools.count():
        stem = f"{part}/rank-{i:05d}"
        if part == "rng" or f"{stem}.json" not in listed:
            break
        stored = {}
        if f"{stem}.safetensors" in listed:
            stored = read_safetensors((folder / f"{stem}.safetensors").read_bytes())
        for entry in json.loads((folder / f"{stem}.json").read_bytes())["pieces"]:
            shape = tuple(entry["shape"])
            dtype, whole, elements = places.setdefault(entry["tensor"], (entry["dtype"], shape, {}))
            data = stored[entry["stored"]].data
            numbers = list(elements_of(entry, shape))
            width = len(data) // len(numbers)
            assert (dtype, whole) == (entry["dtype"], shape)
            assert not elements.keys() & set(numbers)
            elements |= {number: data[i * width : (i + 1) * width] for i, number in enumerate(numbers)}
    found: dict[Any, Stored] = {}
    for name, (dtype, shape, elements) in places.items():
        assert sorted(elements) == list(range(math.prod(shape))), name
        found["pieces", name] = Stored(dtype, shape, b"".join(elements[i] for i in sorted(elements)))
    return found


def elements_of(entry: dict[str, Any], shape: tuple[int, ...]) -> Iterator[int]:
    """Yield the numbers of a piece's elements in the flattened tensor, in the order in which they are stored."""
    if "start" in entry:
        yield from range(entry["start"], entry["stop"])
        return
    ranges = [range(first, first + n) for first, n in zip(entry["offsets"], entry["lengths"], strict=True)]
    for index in itertools.product(*ranges):
        number = 0
        for at, size in zip(index, shape, strict=True):
            number = number * size + at
        yield number


def read_tree(folder: Path, stem: str, listed: dict[str, Any], pieces: dict[Any, Stored] | None = None) -> Any:
    """Return a tree."""
    tensors = f"{stem}.safetensors"
    stored = read_safetensors((folder / tensors).read_bytes()) if tensors in listed else {}
    return tree(json.loads((folder / f"{stem}.json").read_bytes()), {**stored, **(pieces or {})})


def tree(node: Any, stored: dict[Any, Stored]) -> Any:
    """Return what a node of a tree stands for."""
    if isinstance(node, list):
        return [tree(item, stored) for item in node]
    if not isinstance(node, dict):
        return node
    if "$" not in node:
        return {key: tree(item, stored) for key, item in node.items()}
    tag, value = node["$"], node.get("v")
    if tag == "tensor":
        return as_true(stored[value], node.get("dtype"))
    if tag == "pieces":
        return stored.get(("pieces", value), Stored(node["dtype"], tuple(node["shape"]), b""))
    if tag == "ndarray":
        data = stored[value].data if "v" in node else b""
        return Tagged(tag, (node["dtype"], tuple(node["shape"]), data))
    if tag in ("tuple", "set", "frozenset"):
        items = [tree(item, stored) for item in value]
        return {"tuple": tuple, "set": set, "frozenset": frozenset}[tag](items)
    if tag in ("dict", "OrderedDict", "Counter", "defaultdict"):
        pairs = {tree(key, stored): tree(item, stored) for key, item in value}
        return pairs if tag == "dict" else Tagged(tag, (node.get("factory"), pairs))
    return SCALARS[tag](node, stored)


def _time(node: Any, stored: dict[Any, Stored]) -> Any:
    time = datetime.datetime.fromisoformat(node["v"]).replace(fold=node["fold"])
    return Tagged("zoned", (time, node["zone"])) if "zone" in node else time


SCALARS: dict[str, Any] = {
    "npscalar": lambda node, stored: Tagged("npscalar", (node["dtype"], bytes.fromhex(node["v"]))),
    "npstr": lambda node, stored: Tagged("npstr", tree(node["v"], stored)),
    "npbytes": lambda node, stored: Tagged("npbytes", bytes.fromhex(node["v"])),
    "int": lambda node, stored: int(node["v"], 16),
    "float": lambda node, stored: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[node["v"]],
    "complex": lambda node, stored: complex(*(tree(item, stored) for item in node["v"])),
    "str": lambda node, stored: bytes.fromhex(node["v"]).decode("utf-8", "surrogatepass"),
    "bytes": lambda node, stored: bytes.fromhex(node["v"]),
    "datetime": _time,
    "date": lambda node, stored: datetime.date.fromisoformat(node["v"]),
    "timedelta": lambda node, stored: datetime.timedelta(*node["v"]),
    "path": lambda node, stored: Tagged("path", tree(node["v"], stored)),
    "duration": lambda node, stored: Tagged("duration", tuple(tree(item, stored) for item in node["v"])),
    "size": lambda node, stored: Tagged("size", tuple(node["v"])),
    "dtype": lambda node, stored: Tagged("dtype", node["v"]),
    "device": lambda node, stored: Tagged("device", node["v"]),
}
