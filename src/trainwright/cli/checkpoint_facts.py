"""Output of `trainwright checkpoint ls` (one row for each checkpoint) and `show` (contents of one checkpoint)."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trainwright.checkpoint import Manifest, read_manifest, verify
from trainwright.checkpoint.disk.untrusted import read_json, reading
from trainwright.checkpoint.format.codec import TAG, decode, read_tree
from trainwright.checkpoint.format.layout import (
    MANIFEST,
    OPTIMIZER_FOLDER,
    PROGRESS,
    RNG_FOLDER,
    TRAINER_STEM,
    numbered,
)
from trainwright.checkpoint.format.safetensors_io import read_header, read_safetensors
from trainwright.checkpoint.interop.export import stored_tensors
from trainwright.checkpoint.remote import find_remote
from trainwright.core.errors import CheckpointError
from trainwright.core.host.folders import last_part

CHECKPOINTS = "checkpoints"  # the default sub-folder of a run


@dataclass
class Row:
    """Row of a listing for one checkpoint.

    Without a readable manifest, only the name, the path and the problems are set: `step`, `epoch` and `kind` are None.
    """

    name: str
    path: str  # or URL
    step: int | None = None
    epoch: int | None = None
    kind: str | None = None  # `full` or `weights`
    metrics: dict[str, float] = field(default_factory=dict)
    bytes: int = 0  # of the files that the manifest lists
    created: str = ""  # UTC, ISO 8601
    age_s: float = 0.0
    problems: list[str] = field(default_factory=list)  # in words; empty for an intact checkpoint


def checkpoints_at(path: Path) -> list[Path]:
    """Return `path` if it is a checkpoint, else all checkpoints below `path`, at any depth.

    Raises:
        CheckpointError: `path` does not exist, is a file, or contains no checkpoint.
    """
    if _is_checkpoint(path) or not path.is_dir():
        return _folders(path)
    checkpoints = _below(path)
    if not checkpoints:
        raise CheckpointError(f"{path} is not a checkpoint and contains none. Pass a checkpoint or a run's folder.")
    return checkpoints


def _below(folder: Path) -> list[Path]:
    checkpoints: list[Path] = []
    for entry in sorted(folder.iterdir()):
        if _is_checkpoint(entry):
            checkpoints.append(entry)
        elif entry.is_dir() and not entry.is_symlink() and not entry.name.startswith("."):
            checkpoints += _below(entry)
    return checkpoints


def _folders(path: Path) -> list[Path]:
    """Return `path` if it is a checkpoint, else the checkpoints in it or, if there are none, in its `checkpoints`."""
    if not path.exists():
        read_manifest(path)  # raises, with a hint, unless a crash left the checkpoint under a hidden name
        return [path]
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file, and a checkpoint is a folder. Pass a folder.")
    if _is_checkpoint(path):
        return [path]
    for folder in (path, path / CHECKPOINTS):
        if not folder.is_dir():
            continue
        checkpoints = sorted(entry for entry in folder.iterdir() if _is_checkpoint(entry))
        if checkpoints:
            return checkpoints
    return []


def _is_checkpoint(path: Path) -> bool:
    if path.name.startswith(".") or not path.is_dir():
        return False
    # A damaged checkpoint may lack its manifest. It is listed with this problem.
    return (path / MANIFEST).exists() or (path / f"{TRAINER_STEM}.json").exists()


def list_folder(folder: Path, *, hashes: bool = False) -> list[Row]:
    """Return a row for each checkpoint in a run's folder, by step. Checkpoints with unknown steps come first.

    Args:
        folder: the run's folder, its folder of checkpoints, or one checkpoint.
        hashes: compare the hash of each file, which reads it. Default: False, which compares sizes.

    Raises:
        FileNotFoundError: the folder does not exist.
        CheckpointError: `folder` is a file.
    """
    if not folder.exists():
        raise FileNotFoundError(f"there is no folder {folder}. Check the path.")
    rows = [_row(path, hashes) for path in _folders(folder)]
    return sorted(rows, key=_position)


def _position(row: Row) -> tuple[int, str, str]:
    return -1 if row.step is None else row.step, row.created, row.name


def list_remote(url: str) -> list[Row]:
    """Return a row for each complete checkpoint directly below `url`, by step. Only manifests are read."""
    return [_row_of_manifest(last_part(each.url), each.url, each.manifest, []) for each in find_remote(url)]


def _row(path: Path, hashes: bool) -> Row:
    problems = verify(path, hashes=hashes)
    try:
        manifest = read_manifest(path)
    except CheckpointError:  # it is also among the problems
        return Row(path.name, str(path), problems=problems)
    return _row_of_manifest(path.name, str(path), manifest, problems)


def _row_of_manifest(name: str, path: str, manifest: Manifest, problems: list[str]) -> Row:
    age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(manifest.created)
    return Row(
        name=name,
        path=path,
        step=manifest.step,
        epoch=manifest.epoch,
        kind=manifest.kind,
        metrics=dict(manifest.metrics),
        bytes=sum(_bytes_of(manifest, part) for part in manifest.parts),
        created=manifest.created,
        age_s=age.total_seconds(),
        problems=problems,
    )


def _bytes_of(manifest: Manifest, part: str) -> int:
    return sum(entry.size for entry in manifest.parts[part].files.values())


def describe(path: Path) -> dict[str, Any]:
    """Return facts about a checkpoint by name, without reading weights.

    Raises:
        CheckpointError: `path` is not a checkpoint, or it is damaged. Hashes are not compared.
    """
    manifest = read_manifest(path)
    problems = verify(path, hashes=False)
    if problems:
        raise CheckpointError(f"{path} is damaged: {'; '.join(problems)}. Use another checkpoint.")
    with reading(path):
        return _facts(path, manifest)


def _facts(path: Path, manifest: Manifest) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "path": str(path),
        "kind": manifest.kind,
        "step": manifest.step,
        "epoch": manifest.epoch,
        "created": manifest.created,
        "format version": manifest.format_version,
        "topology": dict(manifest.topology),
        "versions": dict(manifest.versions),
        "metrics": dict(manifest.metrics),
        "parts": {name: _part(manifest, name) for name in manifest.parts},
    }
    if "model" in manifest.parts:
        facts["model"] = _model(path)
    if "optimizer" in manifest.parts:
        stems = numbered(manifest.parts["optimizer"].files, OPTIMIZER_FOLDER, "optimizer")
        facts["optimizers"] = [_optimizer(path, stem) for stem in stems]
    if "trainer" in manifest.parts:
        facts |= _trainer(read_tree(path, TRAINER_STEM))
    if "rng" in manifest.parts:
        stems = numbered(manifest.parts["rng"].files, RNG_FOLDER, "rank")
        facts["rng"] = {f"rank {rank}": list(_raw(path, stem)) for rank, stem in enumerate(stems)}
    return facts


def _part(manifest: Manifest, name: str) -> str:
    part = manifest.parts[name]
    optional = "" if part.required else ", optional"
    return f"{len(part.files)} files, {_bytes_of(manifest, name)} bytes{optional}"


def _model(path: Path) -> dict[str, Any]:
    tensors, tied = stored_tensors(path)
    return {
        "tensors": len(tensors),
        "elements": sum(torch.Size(tensor.shape).numel() for tensor in tensors),
        "dtypes": dict(Counter(tensor.dtype for tensor in tensors)),
        "tied": tied,
    }


def _raw(folder: Path, stem: str) -> dict[str, Any]:
    """Return the JSON object of a saved state. The state's tensors are in a separate file."""
    value = read_json(folder / f"{stem}.json")
    if not isinstance(value, dict):
        raise CheckpointError(f"{folder / stem}.json: expected an object, got {type(value).__name__}.")
    return value


class _OnDemand(Mapping[str, torch.Tensor]):
    """Safetensors file whose tensors are read on access."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._names: list[str] = []
        if path.is_file():  # a state without tensors has no file
            self._names = [name for name in read_header(path) if name != "__metadata__"]

    def __getitem__(self, name: str) -> torch.Tensor:
        return read_safetensors(self._path, names=[name])[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _optimizer(folder: Path, stem: str) -> dict[str, Any]:
    """Return the class, the names of the state and the groups of an optimizer.

    Example: `{"class": "AdamW", "state": "exp_avg, step, for 12 of 12 parameters", "groups": [{"parameters": 12,
    "lr": 0.001, …}]}`.
    """
    raw = _raw(folder, stem)
    groups: list[dict[str, Any]] = []
    for group in decode(raw["groups"], _OnDemand(folder / f"{stem}.safetensors")):
        num_parameters = len(group.pop("params"))
        groups.append({"parameters": num_parameters, **_nested(group)})
    states = raw["state"]  # parameter → {"exp_avg": …, "step": …}, encoded
    if TAG in states:
        # The codec writes a dict that JSON cannot represent as a list of pairs.
        entries = [entry for _, entry in states["v"]]
    else:
        entries = list(states.values())
    keys: set[str] = set()
    for entry in entries:
        keys |= set(entry)
    names = ", ".join(sorted(keys)) or "none yet"
    num_states = sum(bool(entry) for entry in entries)  # an optimizer creates a state with the first step
    return {
        "class": str(raw["class"]),
        "state": f"{names}, for {num_states} of {len(entries)} parameters",
        "groups": groups,
    }


def _trainer(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the saved state of the Trainer by name. Nested states of callbacks and schedules are shortened."""
    facts: dict[str, Any] = {"progress": tree.get(PROGRESS, {})}
    for name, value in tree.items():
        if name == PROGRESS:
            continue
        if name == "metrics":  # aggregates of the epoch so far; the latest values are in the manifest
            facts["aggregated"] = [f"rank {rank}: {_aggregated(item)}" for rank, item in enumerate(value)]
        elif isinstance(value, dict):
            facts[name] = {str(key): _nested(item) for key, item in value.items()}
        elif isinstance(value, list) and all(isinstance(item, dict) for item in value):
            facts[name] = [_nested(item) for item in value]
        else:
            facts[name] = _short(value)
    return facts


def _aggregated(item: dict[str, Any]) -> str:
    names = [*item.get("logged", ()), *item.get("objects", ())]
    return ", ".join(map(str, names)) or "nothing"


def _nested(value: object) -> Any:
    if isinstance(value, dict):
        return {str(key): _short(item) for key, item in value.items()}
    return _short(value)


def _short(value: object, limit: int = 100) -> Any:
    """Return a value for a line of output.

    Numbers and None are returned unchanged, and a tensor with one element as a number. Other tensors become their dtype
    and shape. Text, and the `repr` of other values, is shortened to `limit` characters.
    """
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, torch.Tensor):
        if value.numel() == 1:
            return value.item()
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
