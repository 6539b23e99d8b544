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

import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import xxhash

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
MAX_MANIFEST_BYTES = 64 * 2**20
# A parsed file takes some tens of times its size in memory; what is that long belongs into tensors.
MAX_JSON_BYTES = 256 * 2**20

Kind = Literal["full", "weights"]
PARTS: dict[Kind, tuple[str, ...]] = {
    "full": ("trainer", "model", "optimizer", "rng"),
    "weights": ("trainer", "model"),
}

_SEAL = re.compile(rb'"seal": "([0-9a-f]{32})"\n}\n\Z')
_UNSEALED = "0" * 32


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
        values = {"format_version": values.pop("format_version"), **values, "seal": _UNSEALED}
        text = dump_json(values, indent=2).encode() + b"\n"
        digest = xxhash.xxh3_128_hexdigest(text)
        return _SEAL.sub(f'"seal": "{digest}"\n}}\n'.encode(), text)

    @classmethod
    def from_bytes(cls, data: bytes, origin: str) -> Manifest:
        """Read what `to_bytes` wrote; `origin` names the file in messages.

        Raises:
            CheckpointError: it was cut short or changed, was written by a newer format, holds a key twice, or names
                a file outside its folder.
        """
        values = load_json(data, origin)
        if not isinstance(values, dict):
            raise CheckpointError(f"{origin}: expected a JSON object, got {type(values).__name__}.")
        version = check_format_version(values.get("format_version"), origin)
        seal = _SEAL.search(data)
        unsealed = data[: seal.start(1)] + _UNSEALED.encode() + data[seal.end(1) :] if seal else b""
        if seal is None or xxhash.xxh3_128_hexdigest(unsealed) != seal[1].decode():
            raise CheckpointError(
                f"{origin} has been changed or cut short since it was written: its seal does not match. "
                "Use another checkpoint; a manifest cannot be edited by hand."
            )
        try:
            return cls._from_values(upgraded({"manifest": values}, version)["manifest"], version)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{origin}: not a manifest of format {version}: {error!r}.") from error

    @classmethod
    def _from_values(cls, values: dict[str, Any], version: int) -> Manifest:
        parts = {}
        for name, part in values["parts"].items():
            files = {
                check_relative(path, MANIFEST): FileEntry(int(entry["size"]), str(entry["xxh3_128"]))
                for path, entry in part["files"].items()
            }
            parts[name] = Part(files, bool(part["required"]))
        kind = values["kind"]
        if kind not in PARTS:
            raise ValueError(f"unknown kind {kind!r}")
        return cls(
            step=int(values["step"]),
            epoch=int(values["epoch"]),
            created=str(values["created"]),
            kind=kind,
            parts=parts,
            topology={str(name): int(size) for name, size in values["topology"].items()},
            versions={str(name): str(version) for name, version in values["versions"].items()},
            metrics={str(name): float(value) for name, value in values["metrics"].items()},
            format_version=version,
        )


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

    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=unique, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{origin} is not readable JSON: {error}. It is damaged or not ours.") from error


def read_json(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Read a JSON file strictly; see `load_json`.

    Raises:
        CheckpointError: it is longer than `max_bytes` (nothing is read then), or not strict JSON.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise CheckpointError(f"{path} has {size} bytes, more than the {max_bytes} that are read. It is not ours.")
        return load_json(file.read(max_bytes + 1), str(path))


def check_relative(path: object, origin: str) -> str:
    """Return `path` if it is text that names something below its folder, whatever the operating system.

    Raises:
        CheckpointError: it is absolute, climbs with `..`, or is not written in the one plain form.
    """
    if not isinstance(path, str) or not path or any(char in path for char in "\\:\0"):
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
    if not path.resolve().is_relative_to(folder.resolve()):
        raise CheckpointError(
            f"{origin} names {relative!r}, a link to {path.resolve()} outside {folder}. It is refused."
        )
    return path


def numbered(files: Iterable[str], folder: str, stem: str) -> list[str]:
    """Return the stems `folder/stem-00000`, ... of the JSON files among `files`, in order of their numbers.

    Raises:
        CheckpointError: a number is left out.
    """
    pattern = re.compile(rf"{folder}/{stem}-(\d{{5,}})\.json")
    found = sorted(int(match[1]) for name in files if (match := pattern.fullmatch(name)))
    if found != list(range(len(found))):
        raise CheckpointError(f"{MANIFEST} lists {folder}/{stem} files {found}, expected 0 to {len(found) - 1}.")
    return [f"{folder}/{stem}-{number:05d}" for number in found]
