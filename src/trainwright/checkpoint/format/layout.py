"""The layout of a checkpoint folder, and its manifest.

    step-00001200/
      manifest.json                    this module; written last
      model/                           Hugging Face layout, see `trainwright.checkpoint.format.model`
      optimizer/optimizer-00000.json   one per optimizer, keyed by parameter name (+ .safetensors for its tensors)
      trainer.json                     progress, schedulers, callbacks, ... (+ trainer.safetensors)
      rng/rank-00000.json              one per rank (+ .safetensors)

In a sharded checkpoint, model/ has the file state.json (see `codec`) instead of the Hugging Face files. model/ and
optimizer/ then also have two files for each rank: rank-00000.safetensors has the rank's shards, and rank-00000.json
describes these shards.

Every path in a manifest or an index is relative to that file's folder and inside it, so that checkpoints can be moved.
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
MODEL_STEM = f"{MODEL_FOLDER}/state"  # of a sharded model
OPTIMIZER_FOLDER = "optimizer"
RNG_FOLDER = "rng"
TRAINER_STEM = "trainer"
PROGRESS = "progress"  # the key in trainer.json under which `Snapshot.state` is stored
# Hidden, so that programs which list a folder of checkpoints find checkpoints only.
RUN_INDEX = ".index.json"
EARLIER_RUN_INDEX = "index.json"  # the name until the index was hidden
# The entries that a checkpoint folder may have. A hidden folder with any other entry is never deleted.
TOP_LEVEL = frozenset(
    {MANIFEST, MODEL_FOLDER, OPTIMIZER_FOLDER, RNG_FOLDER, f"{TRAINER_STEM}.json", f"{TRAINER_STEM}.safetensors"}
)
# Writer and readers use the same limit. With one file per rank, 10,000 ranks need a manifest of 8 MB.
MAX_MANIFEST_BYTES = 16 * 2**20
Kind = Literal["full", "weights"]
# Kind → names of its parts. "full" has all parts.
PARTS: dict[Kind, tuple[str, ...]] = {
    "full": ("trainer", "model", "optimizer", "rng"),
    "weights": ("trainer", "model"),
}

# The end of a sealed file, see `sealed`. The group is the hash.
_SEAL = re.compile(rb'"seal": "([0-9a-f]{32})"\n}\n\Z')
_SEAL_BYTES = 46  # length of a match of `_SEAL`
_UNSEALED = "0" * 32  # instead of the hash, while the hash is computed
# The beginning of a sealed file. The group is the format version.
_VERSION = re.compile(rb'\s*{\s*"format_version":\s*([0-9]{1,9})\b')

FORMAT_VERSION = 2  # the newest version that can be read
PLAIN_VERSION = 1  # of checkpoints with full tensors only, and of indices
SHARDED_VERSION = 2  # of checkpoints with sharded tensors

Trees = dict[str, Any]
Upgrade = Callable[[Trees], Trees]

# Version → the function that converts trees to the next version. It receives only the trees that were read, by name:
# "manifest" (the object in manifest.json, before any part is read), "index" (a run's .index.json), "remote_index" (the
# index of its uploads), and the decoded parts "trainer" (a dict), "model" (name → value), "optimizer" and "rng" (lists
# of trees).
UPGRADES: dict[int, Upgrade] = {1: lambda trees: trees}  # version 2 only adds sharded tensors


class NewerFormatError(CheckpointError):
    """Raised for a file that a newer version of Trainwright wrote. The file is not damaged."""


def upgraded(trees: Trees, version: int) -> Trees:
    """Return the trees of a checkpoint with format `version`, converted to the newest format; see `UPGRADES`.

    Raises a CheckpointError if the version is older than the oldest one that can be converted.
    """
    for number in range(version, FORMAT_VERSION):
        if number not in UPGRADES:
            raise CheckpointError(f"format_version={version} is older than this Trainwright can read.")
        trees = UPGRADES[number](trees)
    return trees


def check_format_version(version: object, origin: str) -> int:
    """Check a format version that was read from the file `origin`, and return it.

    Raises:
        NewerFormatError: the version is newer than `FORMAT_VERSION`.
        CheckpointError: the value is not a version number.
    """
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise CheckpointError(f"{origin}: format_version={version!r}, expected an integer of at least 1.")
    if version > FORMAT_VERSION:
        raise NewerFormatError(
            f"{origin}: format_version={version} is newer than {FORMAT_VERSION}, the newest that this Trainwright "
            "reads. Upgrade Trainwright: pip install -U trainwright"
        )
    return version


@dataclass(frozen=True, slots=True)
class Part:
    """Part of a checkpoint.

    Attributes:
        files: size and hash of each file by its path, relative to the checkpoint folder.
        required: True if reading fails without the part. All parts that are written now are required.
    """

    files: dict[str, FileEntry]
    required: bool = True


@dataclass(frozen=True, slots=True)
class Manifest:
    """The description of a checkpoint, stored in its `manifest.json`.

    Attributes:
        step: completed optimizer steps.
        epoch: finished epochs.
        created: UTC time of writing in ISO 8601 with microseconds, so that sorting the texts sorts by time.
        kind: `"full"` checkpoints can be resumed. `"weights"` checkpoints contain only the model and the
            hyper-parameters.
        parts: the parts by name: `"trainer"`, `"model"`, `"optimizer"`, `"rng"`.
        topology: number of processes of the run that wrote the checkpoint: `{"world_size": 4}`.
        versions: versions of trainwright, torch and python.
        metrics: the latest metric values at the time of writing, which may be NaN or infinite.
        format_version: format of the checkpoint's files. The other attributes have been converted to the newest format.
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
        """Return the manifest as JSON; see `sealed`. Raise a CheckpointError if it is longer than readers accept."""
        values = asdict(self)
        # JSON has no NaN; text keeps it readable and exact.
        values["metrics"] = {name: repr(float(value)) for name, value in self.metrics.items()}
        # The first entry, so that `check_not_newer` finds it in a format whose rest is unknown.
        values = {"format_version": values.pop("format_version"), **values}
        return check_json_size(sealed(values), MANIFEST, max_bytes=MAX_MANIFEST_BYTES)

    @classmethod
    def from_bytes(cls, data: bytes, origin: str) -> Manifest:
        """Parse the result of `to_bytes`. Error messages name `origin` as the file.

        Raises:
            NewerFormatError: the manifest has a newer format.
            CheckpointError: the manifest was changed, or names a file outside its folder.
        """
        if not seal_fits(data):
            # A newer format may have another seal.
            check_not_newer(data, origin)
            raise CheckpointError(
                f"{origin} was changed or truncated after it was written: its seal does not match. "
                "Use another checkpoint; a manifest cannot be edited."
            )
        values = load_json(data, origin)  # after the seal: a forged or damaged file could make parsing expensive
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
        """Return the manifest for its JSON object. `from_bytes` converts the exceptions of invalid values."""
        parts = {}
        for name, part in values["parts"].items():
            if name not in PARTS["full"]:
                raise ValueError(f"unknown part {name!r}")
            files = {}
            for path, entry in part["files"].items():
                files[check_relative(path, MANIFEST)] = FileEntry(_count(entry["size"]), _text(entry["xxh3_128"]))
            parts[name] = Part(files, bool(part["required"]))
        kind = values["kind"]
        if kind not in PARTS:
            raise ValueError(f"unknown kind {kind!r}")
        created = _text(values["created"])
        moment = datetime.datetime.fromisoformat(created)
        if moment.tzinfo is None:  # `next_moment` compares it with UTC
            raise ValueError(f"{created!r} has no time zone")
        if moment.year >= _LAST_YEAR:  # `next_moment` has no later one
            raise ValueError(f"{created!r} is not a time of writing")
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


def _count(value: object) -> int:
    """Return a number from a file, after a check of its type and range."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} where a count was expected")
    return value


def _text(value: object) -> str:
    """Return text from a file, after a check of its type."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r} where text was expected")
    return value


def sealed(values: dict[str, Any]) -> bytes:
    """Return an object as JSON with the last entry `"seal"`: the hash of the text in which the seal is all zeros.

    The seal detects accidental changes. It does not detect forgery, since anyone can compute a seal.
    """
    text = dump_json({**values, "seal": _UNSEALED}, indent=2).encode() + b"\n"
    digest = xxhash.xxh3_128_hexdigest(text)
    return _SEAL.sub(f'"seal": "{digest}"\n}}\n'.encode(), text)


def seal_fits(data: bytes) -> bool:
    """Return whether `data` ends with a seal that matches the rest of `data`; see `sealed`. Does not parse JSON."""
    seal = _SEAL.search(data, max(0, len(data) - _SEAL_BYTES))
    if seal is None:
        return False
    digest = xxhash.xxh3_128(data[: seal.start(1)])
    digest.update(_UNSEALED.encode() + data[seal.end(1) :])
    return digest.hexdigest() == seal[1].decode()


def check_not_newer(data: bytes, origin: str) -> None:
    """Raise a `NewerFormatError` if the JSON `data` begins with a newer format version. Does not parse the rest."""
    version = _VERSION.match(data)
    if version is not None and int(version[1]) > 0:
        check_format_version(int(version[1]), origin)


def numbered(files: Iterable[str], folder: str, stem: str) -> list[str]:
    """Return `folder/stem-00000`, `folder/stem-00001`, … for these names with `.json` in `files`. A missing number is a
    `CheckpointError`.
    """
    pattern = re.compile(rf"{folder}/{stem}-([0-9]{{5,9}})\.json")
    numbers = []
    for name in files:
        match = pattern.fullmatch(name)
        if match is not None:
            numbers.append(int(match[1]))
    numbers.sort()
    if numbers != list(range(len(numbers))):
        raise CheckpointError(f"{MANIFEST} lists {folder}/{stem} files {numbers}, expected 0 to {len(numbers) - 1}.")
    return [f"{folder}/{stem}-{number:05d}" for number in numbers]


# Time of writing of the newest checkpoint that this process knows, in ISO 8601. Empty before the first one.
_newest = ""


def order_after(created: str) -> None:
    """Give new checkpoints of this process a time of writing after `created`, even if the clock is behind."""
    global _newest
    _newest = max(_newest, created)


_LAST_YEAR = datetime.MAXYEAR  # no checkpoint can be later than its last microsecond


def next_moment() -> str:
    """Return the time for a new manifest: now, or if the clock is behind, 1 µs after the newest known checkpoint."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
    if now <= _newest:
        after = datetime.datetime.fromisoformat(_newest) + datetime.timedelta(microseconds=1)
        now = after.isoformat(timespec="microseconds")
    order_after(now)
    return now


@dataclass
class Snapshot:
    """The content of a checkpoint, in memory.

    Attributes:
        state: result of `TrainState.to_dict()`.
        model: the task's state dict. Names may have the prefixes of wrappers, which are not written. None if the
            checkpoint has no model part, or it was not read.
        optimizers: the result of `named_optimizer_state` for each optimizer.
        trainer: values that `codec.encode` accepts, by name: schedulers, callbacks, `hyper_parameters`, ... The name
            `"progress"` is reserved.
        rng: RNG states, one tree per rank. A full checkpoint needs `world_size` trees.
        metrics: the latest metric values, which are stored in the manifest.
        world_size: number of processes in the run.
        kind: `"full"` or `"weights"`. `"weights"` has no optimizers and no RNG states.
        missing: set by `read_checkpoint`: requested parts that are absent, which its arguments or the manifest allow.
        in_shards: used for writing. True: tensors are `TensorShards`, and each rank writes its shards (see
            `plan_share`).
        state_rests: used for writing. True: only `torch.optim.Optimizer.step` changes the optimizers' tensors, so that
            `AsyncWriter` may copy these tensors while training continues, until the next step.
        extra: used for writing. A folder on the checkpoint's disk, whose files are moved into the checkpoint.
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
    in_shards: bool = False
    state_rests: bool = False
    extra: Path | None = None
