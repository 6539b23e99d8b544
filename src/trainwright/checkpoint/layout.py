"""What lies where in a checkpoint folder, and the manifest that seals it.

    step-00001200/
      manifest.json                    this module; written last
      model/                           Hugging Face layout, see `trainwright.checkpoint.model`
      optimizer/optimizer-00000.json   one per optimizer, keyed by parameter name (+ .safetensors for its tensors)
      trainer.json                     progress, schedulers, callbacks, ... (+ trainer.safetensors)
      rng/rank-00000.json              one per rank (+ .safetensors)

Where tensors lie in pieces, model/ is the tree model/state.json instead, and model/ and optimizer/ have for each rank
rank-00000.json, which says what its pieces are, and rank-00000.safetensors.

Every path in a manifest or an index is relative and stays inside its folder, so that checkpoints can be moved.
"""

from __future__ import annotations

import datetime
import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import xxhash

from trainwright.checkpoint.damage import reading, shortened
from trainwright.checkpoint.upgrade import PLAIN_VERSION, check_format_version, upgraded
from trainwright.core.errors import CheckpointError

MANIFEST = "manifest.json"
MODEL_FOLDER = "model"
MODEL_STEM = f"{MODEL_FOLDER}/state"  # of a model in pieces
OPTIMIZER_FOLDER = "optimizer"
RNG_FOLDER = "rng"
TRAINER_STEM = "trainer"
RUN_INDEX = "index.json"
# What a checkpoint folder may hold at its top level; a hidden folder that holds anything else is not ours to delete.
TOP_LEVEL = frozenset(
    {MANIFEST, MODEL_FOLDER, OPTIMIZER_FOLDER, RNG_FOLDER, f"{TRAINER_STEM}.json", f"{TRAINER_STEM}.safetensors"}
)
# Bounds that writer and readers share. A file of each rank of 10,000 makes a manifest of 8 MB.
MAX_MANIFEST_BYTES = 16 * 2**20
# 140,000 tensors of optimizer state in shards make an index of 50 MB and 2,300,000 values.
MAX_JSON_BYTES = 128 * 2**20
# What a parsed file takes in memory goes by its values (an empty list of two bytes takes 64), not by its length.
MAX_JSON_VALUES = 4_000_000

Kind = Literal["full", "weights"]
PARTS: dict[Kind, tuple[str, ...]] = {
    "full": ("trainer", "model", "optimizer", "rng"),
    "weights": ("trainer", "model"),
}

_SEAL = re.compile(rb'"seal": "([0-9a-f]{32})"\n}\n\Z')
_SEAL_BYTES = 46  # that the pattern takes
_UNSEALED = "0" * 32
_VERSION = re.compile(rb'\s*{\s*"format_version":\s*([0-9]{1,9})\b')


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a checkpoint.

    Attributes:
        size: its length in bytes.
        xxh3_128: the XXH3 128-bit hash of its bytes, 32 hexadecimal digits. It finds damage, not forgery.
    """

    size: int
    xxh3_128: str


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a checkpoint: its files by path relative to the checkpoint folder, and whether a resume needs it."""

    files: dict[str, FileEntry]
    required: bool = True


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint says about itself.

    Attributes:
        step: completed optimizer steps.
        epoch: finished epochs.
        created: UTC time in ISO 8601 with microseconds; sorts as text.
        kind: `"full"` can be resumed, `"weights"` holds the model and the hyper-parameters only.
        parts: `"trainer"`, `"model"`, `"optimizer"`, `"rng"`.
        topology: the world sizes of the run that wrote it, `{"world_size": 4}`.
        versions: of trainwright, torch and python.
        metrics: the latest metrics when it was written; may hold NaN and infinities.
        format_version: of the checkpoint as it lies on the disk; everything else here is of today's.
    """

    step: int
    epoch: int
    created: str
    kind: Kind
    parts: dict[str, Part]
    topology: dict[str, int] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    format_version: int = PLAIN_VERSION

    def to_bytes(self) -> bytes:
        """Return the manifest as JSON whose last entry, the seal, is the hash of everything else in it."""
        values = asdict(self)
        # JSON has no NaN; text keeps it readable and exact.
        values["metrics"] = {name: repr(float(value)) for name, value in self.metrics.items()}
        values = {"format_version": values.pop("format_version"), **values}
        return check_json_size(sealed(values), MANIFEST, max_bytes=MAX_MANIFEST_BYTES)

    @classmethod
    def from_bytes(cls, data: bytes, origin: str) -> Manifest:
        """Read what `to_bytes` wrote; `origin` names the file in messages.

        Raises:
            CheckpointError: it was cut short or changed, was written by a newer format, holds a key twice, or names
                a file outside its folder.
        """
        if not seal_fits(data):
            check_not_newer(data, origin)
            raise CheckpointError(
                f"{origin} has been changed or cut short since it was written: its seal does not match. "
                "Use another checkpoint; a manifest cannot be edited by hand."
            )
        values = load_json(data, origin)  # not before: parsing is what a forged or damaged file could make expensive
        if not isinstance(values, dict):
            raise CheckpointError(f"{origin}: expected a JSON object, got {type(values).__name__}.")
        version = check_format_version(values.get("format_version"), origin)
        try:
            return cls._from_values(upgraded({"manifest": values}, version)["manifest"], version)
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"{origin}: not a manifest of format {version}: {shortened(error)}.") from error

    @classmethod
    def _from_values(cls, values: dict[str, Any], version: int) -> Manifest:
        parts = {}
        for name, part in values["parts"].items():
            if name not in PARTS["full"]:
                raise ValueError(f"unknown part {name!r}")
            files = {
                check_relative(path, MANIFEST): FileEntry(_count(entry["size"]), _text(entry["xxh3_128"]))
                for path, entry in part["files"].items()
            }
            parts[name] = Part(files, bool(part["required"]))
        kind, created = values["kind"], _text(values["created"])
        if kind not in PARTS:
            raise ValueError(f"unknown kind {kind!r}")
        if datetime.datetime.fromisoformat(created).tzinfo is None:  # later checkpoints are given later times
            raise ValueError(f"{created!r} has no time zone")
        return cls(
            step=_count(values["step"]),
            epoch=_count(values["epoch"]),
            created=created,
            kind=kind,
            parts=parts,
            topology={name: _count(size) for name, size in values["topology"].items()},
            versions={name: _text(version) for name, version in values["versions"].items()},
            metrics={name: float(_text(value)) for name, value in values["metrics"].items()},
            format_version=version,
        )


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} where a count was expected")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} where text was expected")
    return value


def sealed(values: dict[str, Any]) -> bytes:
    """Return an object as JSON whose last entry, the seal, is the hash of everything else in it."""
    text = dump_json({**values, "seal": _UNSEALED}, indent=2).encode() + b"\n"
    digest = xxhash.xxh3_128_hexdigest(text)
    return _SEAL.sub(f'"seal": "{digest}"\n}}\n'.encode(), text)


def seal_fits(data: bytes) -> bool:
    """Tell whether `data` ends with a seal, and that is the hash of the rest; parses nothing."""
    seal = _SEAL.search(data, max(0, len(data) - _SEAL_BYTES))
    if seal is None:
        return False
    digest = xxhash.xxh3_128(data[: seal.start(1)])
    digest.update(_UNSEALED.encode() + data[seal.end(1) :])
    return digest.hexdigest() == seal[1].decode()


def check_not_newer(data: bytes, origin: str) -> None:
    """Check the version that a file states first, which a newer one does too whatever else it has changed.

    Raises:
        NewerFormatError: it is newer than this Trainwright's.
    """
    stated = _VERSION.match(data)
    if stated is not None and int(stated[1]) > 0:
        check_format_version(int(stated[1]), origin)


def dump_json(value: Any, *, indent: int | None = None) -> str:
    """Return `value` as JSON text; NaN and infinities are a ValueError, since JSON cannot hold them."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent)


def load_json(data: bytes, origin: str) -> Any:
    """Parse UTF-8 JSON strictly.

    Raises:
        CheckpointError: no JSON, no UTF-8, nested beyond reason, or an object holds the same key twice (two readers
            could then take different values for it).
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise CheckpointError(f"{origin}: the key {key!r} stands twice in one object. The file is not ours.")
            found[key] = value
        return found

    def constant(word: str) -> Any:
        raise CheckpointError(f"{origin}: {word} is not JSON.")

    check_json_size(data, origin)
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=unique, parse_constant=constant)
    except (ValueError, RecursionError, MemoryError) as error:
        raise CheckpointError(
            f"{origin} is not readable JSON: {shortened(error)}. It is damaged or not ours."
        ) from error


def check_json_size(data: bytes, origin: str, *, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Return `data` if it is short enough to be parsed, told without parsing it; writers ask the same.

    Raises:
        CheckpointError: it has more than `max_bytes`, or more than `MAX_JSON_VALUES` values (commas and brackets are
            counted, those in text too).
    """
    if len(data) > max_bytes:
        raise CheckpointError(
            f"{origin} has {len(data)} bytes, more than the {max_bytes} that are read. Save long lists as tensors or "
            "arrays."
        )
    if len(data) > MAX_JSON_VALUES:  # a value takes a byte
        count = data.count(b",") + data.count(b"[") + data.count(b"{")
        if count > MAX_JSON_VALUES:
            raise CheckpointError(
                f"{origin} has {count} values, more than the {MAX_JSON_VALUES} that are read. Save long lists as "
                "tensors or arrays."
            )
    return data


def read_json(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Read a JSON file strictly; see `load_json`.

    Raises:
        CheckpointError: it cannot be opened, is longer than `max_bytes` (nothing is read then), or not strict JSON.
    """
    return load_json(read_bytes(path, max_bytes=max_bytes), str(path))


def read_bytes(path: Path, *, max_bytes: int) -> bytes:
    """Return what a small file holds.

    Raises:
        CheckpointError: it cannot be opened, or has more than `max_bytes`; nothing is read then.
    """
    with reading(path), open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise CheckpointError(f"{path} has {size} bytes, more than the {max_bytes} that are read. It is not ours.")
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise CheckpointError(f"{path} is longer than the {max_bytes} bytes that are read. It is not ours.")
    return data


def check_relative(path: object, origin: str) -> str:
    """Return `path` if it is text that names something below its folder, whatever the operating system.

    Raises:
        CheckpointError: it is absolute, climbs with `..`, or is not written in the one plain form.
    """
    if not isinstance(path, str) or not path or any(char in path for char in "\\:\0") or not is_printable(path):
        raise CheckpointError(f"{origin} names {path!r}, which is no plain relative path.")
    if path.startswith("/") or any(step in ("", ".", "..") for step in path.split("/")):
        raise CheckpointError(f"{origin} names {path!r}, which may lie outside its folder. It is refused.")
    return path


def inside(folder: Path, relative: str, origin: str) -> Path:
    """Return `folder / relative` after checking that it stays inside `folder`, symbolic links followed.

    Raises:
        CheckpointError: it would leave the folder.
    """
    path = folder / PurePosixPath(check_relative(relative, origin))
    with reading(path):  # a link to itself, for one
        target, root = path.resolve(), folder.resolve()
    if not target.is_relative_to(root):
        raise CheckpointError(f"{origin} names {relative!r}, a link to {target} outside {folder}. It is refused.")
    return path


def is_printable(text: str) -> bool:
    """Tell whether `text` survives UTF-8 (lone surrogates, as in undecodable file names, do not)."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def numbered(files: Iterable[str], folder: str, stem: str) -> list[str]:
    """Return the stems `folder/stem-00000`, ... of the JSON files among `files`, in order of their numbers.

    Raises:
        CheckpointError: a number is left out.
    """
    pattern = re.compile(rf"{folder}/{stem}-([0-9]{{5,9}})\.json")
    found = sorted(int(match[1]) for name in files if (match := pattern.fullmatch(name)))
    if found != list(range(len(found))):
        raise CheckpointError(f"{MANIFEST} lists {folder}/{stem} files {found}, expected 0 to {len(found) - 1}.")
    return [f"{folder}/{stem}-{number:05d}" for number in found]
