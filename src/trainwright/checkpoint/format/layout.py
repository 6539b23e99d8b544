"""What lies where in a checkpoint folder, and the manifest that seals it.

    step-00001200/
      manifest.json                    this module; written last
      model/                           Hugging Face layout, see `trainwright.checkpoint.format.model`
      optimizer/optimizer-00000.json   one per optimizer, keyed by parameter name (+ .safetensors for its tensors)
      trainer.json                     progress, schedulers, callbacks, ... (+ trainer.safetensors)
      rng/rank-00000.json              one per rank (+ .safetensors)

Where tensors lie in pieces, model/ is the tree model/state.json instead, and model/ and optimizer/ have for each rank
rank-00000.json, which says what its pieces are, and rank-00000.safetensors.

Every path in a manifest or an index is relative and stays inside its folder, so that checkpoints can be moved.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import xxhash

from trainwright.checkpoint.disk.durable import FileEntry
from trainwright.checkpoint.disk.untrusted import check_json_size, check_relative, dump_json, load_json, shortened
from trainwright.core.errors import CheckpointError

MANIFEST = "manifest.json"
MODEL_FOLDER = "model"
MODEL_STEM = f"{MODEL_FOLDER}/state"  # of a model in pieces
OPTIMIZER_FOLDER = "optimizer"
RNG_FOLDER = "rng"
TRAINER_STEM = "trainer"
PROGRESS = "progress"  # the key of trainer.json under which `Snapshot.state` is stored
RUN_INDEX = "index.json"
# What a checkpoint folder may hold at its top level; a hidden folder that holds anything else is not ours to delete.
TOP_LEVEL = frozenset(
    {MANIFEST, MODEL_FOLDER, OPTIMIZER_FOLDER, RNG_FOLDER, f"{TRAINER_STEM}.json", f"{TRAINER_STEM}.safetensors"}
)
# Bounds that writer and readers share. A file of each rank of 10,000 makes a manifest of 8 MB.
MAX_MANIFEST_BYTES = 16 * 2**20
Kind = Literal["full", "weights"]
PARTS: dict[Kind, tuple[str, ...]] = {
    "full": ("trainer", "model", "optimizer", "rng"),
    "weights": ("trainer", "model"),
}

_SEAL = re.compile(rb'"seal": "([0-9a-f]{32})"\n}\n\Z')
_SEAL_BYTES = 46  # that the pattern takes
_UNSEALED = "0" * 32
_VERSION = re.compile(rb'\s*{\s*"format_version":\s*([0-9]{1,9})\b')


FORMAT_VERSION = 2  # the newest that is read
PLAIN_VERSION = 1  # what checkpoints of whole tensors, and indices, are written as
PIECES_VERSION = 2  # those whose tensors lie in pieces

Trees = dict[str, Any]
Upgrade = Callable[[Trees], Trees]

# Version → what makes the next one of it. It is called with the trees that were read, and only those: a reader that
# wants the weights alone has no others. Under "manifest" the object of a manifest.json (before any part is read),
# under "index" that of a run's index.json, under "remote_index" that of its remote copy; under the name of a part the
# decoded part: "trainer" (a dict), "model" (name → value), "optimizer" and "rng" (lists of trees).
UPGRADES: dict[int, Upgrade] = {1: lambda trees: trees}  # 2 has added tensors in pieces, and changed nothing


class NewerFormatError(CheckpointError):
    """A file was written by a newer Trainwright than this one; it is not damaged."""


def upgraded(trees: Trees, version: int) -> Trees:
    """Convert trees of the format `version` to the newest format."""
    for number in range(version, FORMAT_VERSION):
        if number not in UPGRADES:
            raise CheckpointError(f"format_version={version} is older than this Trainwright can read.")
        trees = UPGRADES[number](trees)
    return trees


def check_format_version(version: object, origin: str) -> int:
    """Return the version that the file `origin` states. A newer one than `FORMAT_VERSION` is a `NewerFormatError`,
    anything else that is not a version a `CheckpointError`.
    """
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise CheckpointError(f"{origin}: format_version={version!r}, expected a whole number from 1 on.")
    if version > FORMAT_VERSION:
        raise NewerFormatError(
            f"{origin}: format_version={version} is newer than {FORMAT_VERSION}, the newest that this Trainwright "
            "reads. Upgrade it: pip install -U trainwright"
        )
    return version


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
        """Read the bytes that `to_bytes` wrote; `origin` names the file in messages.

        Raises:
            CheckpointError: it was changed, is of a newer format, or names a file outside its folder.
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
    """Raise a `NewerFormatError` if the version at the beginning of a file is newer; the rest is not read."""
    stated = _VERSION.match(data)
    if stated is not None and int(stated[1]) > 0:
        check_format_version(int(stated[1]), origin)


def numbered(files: Iterable[str], folder: str, stem: str) -> list[str]:
    """Return the stems `folder/stem-00000`, ... of the JSON files among `files`, in order. A gap is a
    `CheckpointError`.
    """
    pattern = re.compile(rf"{folder}/{stem}-([0-9]{{5,9}})\.json")
    found = sorted(int(match[1]) for name in files if (match := pattern.fullmatch(name)))
    if found != list(range(len(found))):
        raise CheckpointError(f"{MANIFEST} lists {folder}/{stem} files {found}, expected 0 to {len(found) - 1}.")
    return [f"{folder}/{stem}-{number:05d}" for number in found]


_youngest = ""  # when the newest checkpoint that this process knows was written


def go_on_from(created: str) -> None:
    """Order new checkpoints of this process after one written at `created`, even if the clock is behind."""
    global _youngest
    _youngest = max(_youngest, created)


def next_moment() -> str:
    """Return the present time in UTC, or the first microsecond behind the newest checkpoint's."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
    if now <= _youngest:
        after = datetime.datetime.fromisoformat(_youngest) + datetime.timedelta(microseconds=1)
        now = after.isoformat(timespec="microseconds")
    go_on_from(now)
    return now


@dataclass
class Snapshot:
    """The content of a checkpoint, in memory.

    Attributes:
        state: `TrainState.to_dict()`.
        model: the task's state dict by plain names. None: there is no model part.
        optimizers: one tree of `named_optimizer_state` each.
        trainer: values that `codec.encode` accepts, by name: schedulers, callbacks, `hyper_parameters`, ... The name
            `"progress"` is reserved.
        rng: one tree per rank; a full checkpoint needs `world_size` of them.
        metrics: the latest values, also in the manifest.
        world_size: processes of the run.
        kind: `"weights"` has no optimizers and RNG.
        missing: after reading: requested parts that are absent, and allowed to be.
        in_pieces: before writing: all ranks write such snapshots together, with `Pieces` as tensors (see `plan_share`).
        overlaps: before writing: only `torch.optim.Optimizer.step` changes the optimizers' tensors, so that
            `AsyncWriter` may copy them until the next step.
        extra: before writing: a folder on the same disk whose files become part of the checkpoint.
    """

    state: dict[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] | None = None
    optimizers: list[Any] = field(default_factory=list)
    trainer: dict[str, Any] = field(default_factory=dict)
    rng: list[Any] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    world_size: int = 1
    kind: Kind = "full"
    missing: tuple[str, ...] = ()
    in_pieces: bool = False
    overlaps: bool = False
    extra: Path | None = None
